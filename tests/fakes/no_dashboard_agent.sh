# In the place of the dashboard's agent of a Ray node: says that it has no ports, as Ray's own does where the packages of
# the dashboard are not installed, and ends after the node.
for word; do
    case $word in
        --node-id=*) node=${word#*=} ;;
        --session-dir=*) folder=${word#*=} ;;
    esac
done
for name in metrics_agent metrics_export dashboard_agent_listen; do
    path=$folder/${name}_port_$node
    printf %s -1 > "$path.new"
    mv "$path.new" "$path"
done
exec tail --pid="$PPID" -s 0.5 -f /dev/null
