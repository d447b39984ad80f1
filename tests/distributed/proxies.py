"""HTTP proxies: one for CONNECT in this process, and tinyproxy."""

import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager, suppress

import pytest


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
        try:
            far = socket.create_connection(("127.0.0.1", (names or {}).get(host, int(port))))
        except OSError:
            client.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
            client.close()
            return
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


def tinyproxy(folder):
    """The path of tinyproxy, from Debian's package, which is unpacked into a folder unless it is installed."""
    if found := shutil.which("tinyproxy"):
        return found
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        pytest.skip("tinyproxy is not installed, and there is no apt-get to get it")
    own = ["-o", f"Dir::State={folder}/state", "-o", f"Dir::Cache={folder}/cache"]
    for place in ("state/lists/partial", "cache/archives/partial", "unpacked"):
        (folder / place).mkdir(parents=True)
    get = ["apt-get", "-q", *own]
    if subprocess.run(["apt-get", "-q", "download", "tinyproxy-bin"], cwd=folder, capture_output=True).returncode:
        subprocess.run([*get, "update"], check=True, cwd=folder, capture_output=True)
        subprocess.run([*get, "download", "tinyproxy-bin"], check=True, cwd=folder, capture_output=True)
    (package,) = folder.glob("tinyproxy-bin_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder / "unpacked"], check=True)
    return str(folder / "unpacked/usr/bin/tinyproxy")
