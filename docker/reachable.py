"""Ends with status 0 if HOST:PORT speaks TLS with a certificate that /keys/ca.crt vouches for."""

import socket
import ssl
import sys

host, _, port = sys.argv[1].rpartition(":")
context = ssl.create_default_context(cafile="/keys/ca.crt")
with (
    socket.create_connection((host, int(port)), timeout=4.0) as plain,
    context.wrap_socket(plain, server_hostname=host),
):
    pass
