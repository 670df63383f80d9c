# In the place of an agent of a Ray node, the dashboard's or that of runtime environments: says that it has no ports, as
# the dashboard's does where its packages are not installed, and ends after the node.
for word; do
    case $word in
        --node-id=*) node=${word#*=} ;;
        --session-dir=*) folder=${word#*=} ;;
    esac
done
for name in metrics_agent metrics_export dashboard_agent_listen runtime_env_agent; do
    path=$folder/${name}_port_$node
    printf %s -1 > "$path.$$"
    mv "$path.$$" "$path"
done
exec tail --pid="$PPID" -s 0.5 -f /dev/null
