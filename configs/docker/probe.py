"""Asks a service's own port for a page and exits 0 on 200: the health check of images that have no curl.

Imports only `socket` and `sys`, and is run with -I -S, for it is started every few seconds in every container.
"""

import socket
import sys

TIMEOUT_S = 2.5

port, path = sys.argv[1:]
try:
    with socket.create_connection(("127.0.0.1", int(port)), TIMEOUT_S) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
except OSError as error:
    sys.exit(f"no answer on port {port}: {error}")
head, _, body = answer.partition(b"\r\n\r\n")
print(body.decode("utf-8", "replace").strip()[:500])
sys.exit(0 if b" 200 " in head.partition(b"\r\n")[0] else 1)
