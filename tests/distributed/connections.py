"""Two ends of a TLS connection in one process."""

import socket
import threading
import time

from quasiglobal.peers.tls import TLSChannel, prepare


def soon(seconds=30.0):
    return time.monotonic() + seconds


def at_once(*works):
    """Run functions in threads; return their results, or raise the first error."""
    results = [None] * len(works)

    def run(k):
        try:
            results[k] = works[k]()
        except Exception as error:
            results[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def shaken(listening, dialling):
    """Two connected SSL sockets of these sites, after the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    for one in (client, accepted):
        prepare(one, 10)
    return at_once(
        lambda: listening.server_context().wrap_socket(accepted, server_side=True),
        lambda: dialling.client_context().wrap_socket(client),
    )


def channels(sites):
    """Two connected channels."""
    return [TLSChannel(one) for one in shaken(*sites.folders[:2])]
