#!/bin/sh
# Write what the machines of compose.yaml have: keys, the app, and the sites' configurations. It may run again.
set -eu
umask 077

cd /srv/authority
fedskew federate certs keys --sites north,south,east --host server
fedskew partition --data digits --clients 3 --beta 0.3 --save split.json
if [ ! -d app ]; then
    fedskew federate init app --sites north,south,east --data digits --method fedvls --rounds 3 \
        --federation folder=/srv/federation/runs/first --federation minimum=3
fi

# The server gets its certificate, the app, and the sites' public keys. The authority's key stays here.
mkdir -p /srv/federation/keys/sites /srv/federation/flower
cp keys/ca.pem keys/server.pem keys/server.key /srv/federation/keys/
cp -R app /srv/federation/
cat > /srv/federation/flower/config.toml <<END
[superlink]
default = "federation"

[superlink.federation]
address = "127.0.0.1:9093"
root-certificates = "/srv/federation/keys/ca.pem"
END
cp keys/ca.pem keys/server.pem keys/server.key /etc/fedskew/

# Each site gets its own key, the app, and its part of the data. Its administrator approves the app.
client=0
for name in north south east; do
    site=/srv/sites/$name
    cp "keys/sites/$name/node.pub" "/srv/federation/keys/sites/$name.pub"
    mkdir -p "$site/keys" "$site/state"
    cp keys/ca.pem "keys/sites/$name/node.key" "$site/keys/"
    cp -R app split.json "$site/"
    cat > "$site/site.yaml" <<END
name: $name
data: digits
split: split.json
client: $client
END
    fedskew federate approve app "$site/site.yaml" --by compose.yaml --yes
    client=$((client + 1))
done
