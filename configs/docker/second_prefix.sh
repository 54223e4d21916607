#!/bin/sh
# Prints nats.conf with the services' users once more, for a second pipeline under another bus.prefix on the same server:
#   sh configs/docker/second_prefix.sh two > nats-two.conf
# They are called two-gateway, two-tokenizer and so on, have the passwords of the first ones, and the same permissions on
# the second prefix's subjects and streams only.
set -eu
prefix=${1:?"name the second prefix: sh $0 PREFIX > FILE"}
case $prefix in
nj | [!a-z]* | *[!a-z0-9_-]*) echo "a second prefix begins with a-z, goes on with a-z, 0-9, '_' and '-', and is not nj" >&2; exit 2 ;;
esac
upper=$(printf %s "$prefix" | tr '[:lower:]' '[:upper:]')
conf=$(dirname "$0")/../nats.conf
sed '/# ---- people/,$d' "$conf"
sed -n '/# ---- services/,/# ---- people/{/# ----/!p;}' "$conf" |
  sed -e "s/user: /user: $prefix-/" -e "s/\"nj\.v1\./\"$prefix.v1./g" -e "s/\([.\"]\)NJ_/\1${upper}_/g" \
    -e "s/KV_nj_/KV_${prefix}_/g" -e "s/\$KV\.nj_/\$KV.${prefix}_/g"
sed -n '/# ---- people/,$p' "$conf"
