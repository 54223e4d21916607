#!/bin/sh
# Prints a fresh password for every user of the bus, as compose reads them from the file .env:
#   sh configs/docker/credentials.sh >> .env
set -eu
for user in gateway tokenizer scheduler cache_manager executor console client operator; do
  name=$(printf %s "$user" | tr '[:lower:]' '[:upper:]')
  printf 'NJ_PASSWORD_%s=%s\n' "$name" "$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"
done
