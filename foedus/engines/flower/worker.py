"""The resident worker of a site: it answers messages with the foedus that is installed here.

A SuperNode with `--isolation process` gives its tasks to the process that requests them at its
Runtime API, on loopback. Flower's own executor unpacks the app bundle that came over the network
and runs its code. This worker never reads the bundle: it takes the message out of the task, answers
it by `foedus.engines.flower.client.SiteApp`, and sends the answer back. So a site runs only code
that is installed there, and nothing that a server sends.

A child process computes the answer, so that the worker survives if it is killed (for example, out
of memory): the parent, in which everything is imported already, reports the task as failed and
forks the next child.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foedus.engines.flower.policy import Policy

if TYPE_CHECKING:
    from flwr.supercore.runtime import RuntimeHttpClient

KILLED = "the client process was killed"
_ENDED = 17
"""The exit code of a child whose SuperNode has ended."""
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


class Ended(Exception):  # noqa: N818 - what has happened
    """The SuperNode has ended, and with it the worker."""


@dataclass(frozen=True)
class Worker:
    """Works for the SuperNode whose Runtime API is at `address` ("127.0.0.1:PORT").

    Args:
        address: The Runtime API of the SuperNode.
        secret: The secret of the SuperNode (`--superexec-auth-secret-file`), so that no other user
            of this machine gets a task.
        code: "module:name" of algorithms that are importable here; not from any message.
        policy: The file of the site's policy; its settings take the place of a node config.
        bell: The end of a pipe on which the SuperNode signals a task.
        pause: Seconds between two requests for a task without the bell.
    """

    address: str
    secret: bytes | None = None
    code: str | None = None
    policy: Path | None = None
    bell: int | None = None
    pause: float = 1.0

    def run(self) -> None:
        """Answer tasks until this process is ended."""
        import torch

        import foedus.algorithms
        import foedus.engines.flower.client  # noqa: F401 - for the children

        torch.set_num_threads(1)
        token = mmap.mmap(-1, 4096)  # token of the current task, for the parent
        while True:
            began, pid = time.monotonic(), os.fork()
            if pid == 0:
                code = 1
                try:
                    self.work(token)
                except Ended:
                    code = _ENDED
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
            if os.waitstatus_to_exitcode(status) == _ENDED:
                return
            held = token[:].rstrip(b"\0").decode("ascii", "replace")
            if held:
                with contextlib.suppress(Exception):  # the SuperNode is gone, too
                    self._finish(self._client(held, once=True), None, KILLED)
                token[:] = bytes(len(token))
            time.sleep(max(0.0, 0.5 - (time.monotonic() - began)))

    def work(self, token: Any) -> None:
        """Answer one task after the other; `token` holds the token of the current one."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        tasks, kinds = self._client(), [TaskType.CLIENT_APP]
        while True:
            found = tasks.AcquireTask(AcquireTaskRequest(supported_task_types=kinds))
            if not found.HasField("task"):
                self._wait()
                continue
            token[:] = found.token.encode("ascii").ljust(len(token), b"\0")
            self.answer(self._client(found.token))
            token[:] = bytes(len(token))

    def _wait(self) -> None:
        """Wait for the bell, at most `pause` seconds."""
        if self.bell is None:
            time.sleep(self.pause)
        elif select.select([self.bell], [], [], self.pause)[0] and not os.read(self.bell, 1024):
            raise Ended

    def answer(self, client: RuntimeHttpClient) -> None:
        """Answer the message of one task. The app bundle that comes with it is ignored."""
        from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
        from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

        from foedus.engines.flower.client import SiteApp

        beat = HeartbeatSender(make_task_heartbeat_fn_http(client))
        beat.start()
        try:
            message, context, _run, _bundle = pull_task_input(client)
            context.run_config = {"code": self.code} if self.code else {}  # never the bundle's
            policy = None if self.policy is None else Policy.read(self.policy)
            if policy is not None:
                context.node_config = policy.node_config()
            push_message(client, SiteApp(policy)(message, context), context)
            self._finish(client, context)
        finally:
            if beat.is_running:
                beat.stop()
            client.close()

    def _finish(self, client: RuntimeHttpClient, context: Any, failure: str = "") -> None:
        from flwr.common.constant import SubStatus
        from flwr.supernode.runtime.run_clientapp import push_task_output

        status = SubStatus.FAILED if failure else SubStatus.COMPLETED
        push_task_output(client, context, status, failure)

    def _client(self, token: str | None = None, once: bool = False) -> RuntimeHttpClient:
        """A connection to the SuperNode: for one task, or (without a token) to ask for tasks."""
        from flwr.supercore.interceptors import (
            RuntimeTokenHttpInterceptor,
            RuntimeVersionHttpInterceptor,
            SuperExecAuthHttpInterceptor,
        )
        from flwr.supercore.retry import make_simple_http_retry_invoker
        from flwr.supercore.runtime import RuntimeHttpClient

        name = "SuperExec" if token is None else "flwr-clientapp"
        interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name=name)]
        if token is not None:
            interceptors.append(RuntimeTokenHttpInterceptor(token))
        elif self.secret:
            signed = SuperExecAuthHttpInterceptor(
                master_secret=self.secret, protected_methods=[_ACQUIRE]
            )
            interceptors.append(signed)
        retry = make_simple_http_retry_invoker()
        if once:  # it would end this process if a child had finished before it was killed
            retry.should_giveup = lambda error: True
        return RuntimeHttpClient.from_server_address(
            server_address=self.address, insecure=True, root_certificates=None,
            interceptors=interceptors, retry_invoker=retry,
        )  # fmt: skip


def main(words: list[str], bell: int | None = None) -> None:
    """`worker ADDRESS SECRET_FILE [MODULE:NAME [POLICY]]`."""
    address, secret, code, policy = [*words, "", ""][:4]
    known = Path(secret).read_bytes(), code or None, Path(policy) if policy else None
    Worker(address, *known, bell).run()
