"""An HTTP proxy for CONNECT in this process."""

import socket
import threading
from contextlib import contextmanager, suppress


@contextmanager
def proxy(answer=None, names=None):
    """Serve CONNECT at a free port; yield its URL and the heads of the requests.

    `names` are the ports of hosts that only this proxy knows; `answer` is sent in place of a connection.
    """
    server, heads, held = socket.create_server(("127.0.0.1", 0)), [], []

    def pass_on(source, sink):
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve(client):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += client.recv(65536)
        heads.append(head.decode())
        if answer is not None:
            client.sendall(answer)
            client.close()
            return
        host, _, port = head.split()[1].decode().rpartition(":")
        far = socket.create_connection(("127.0.0.1", (names or {}).get(host, int(port))))
        held.append(far)
        client.sendall(b"HTTP/1.1 200 Connection established\r\nVia: 1.1 test\r\n\r\n")
        threading.Thread(target=pass_on, args=(far, client), daemon=True).start()
        pass_on(client, far)

    def accept():
        with suppress(OSError):
            while True:
                held.append(server.accept()[0])
                threading.Thread(target=serve, args=(held[-1],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}", heads
    finally:
        for one in (server, *held):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
