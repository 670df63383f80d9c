#!/bin/sh
# Make the key and the certificate of one Ray node, signed by the cluster's authority. Runs as an init container, so
# that only it sees the authority's key: node-certificate AUTHORITY_FOLDER NODE_FOLDER
# Ray nodes call each other by address: POD_IP has to be in the certificate.
set -eu
umask 077

authority=$1
node=$2
: "${POD_IP:?the address of the pod, from status.podIP}"

openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$node/tls.key"
openssl req -new -key "$node/tls.key" -subj "/CN=batchmill-ray-node" -out "$node/tls.csr"
cat >"$node/tls.ext" <<EXTENSIONS
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectAltName = IP:$POD_IP, IP:127.0.0.1, DNS:localhost, DNS:batchmill-head-svc, DNS:batchmill-head-svc.batchmill.svc.cluster.local
EXTENSIONS
openssl x509 -req -in "$node/tls.csr" -CA "$authority/tls.crt" -CAkey "$authority/tls.key" \
    -set_serial "0x$(openssl rand -hex 16)" -days 365 -sha256 -extfile "$node/tls.ext" -out "$node/tls.crt"
cp "$authority/tls.crt" "$node/ca.crt"
rm "$node/tls.csr" "$node/tls.ext"
