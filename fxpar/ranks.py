"""Start processes that are the ranks of a plan on this machine, and learn what became of every one.

torchrun starts them; a rank says why it failed in a file of its own, so that its message is not lost among the
launcher's. Nothing here waits longer than it is told to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fxpar.plans.errors import FxparError

FOLDER = "FXPAR_RANK_REPORTS"
"""Environment variable: where ranks leave their messages."""


@dataclass(frozen=True)
class RanksEnd:
    """How a run of ranks ended.

    Attributes:
        code: the launcher's exit code, None when the time was up.
        messages: (rank, message) of every rank that failed.
        log: the last lines that the launcher and every rank wrote to stderr.
    """

    code: int | None
    messages: tuple[tuple[int, str], ...]
    log: str

    @property
    def failures(self) -> tuple[str, ...]:
        """What to tell the user; empty when all ranks ended well."""
        if self.code == 0 and not self.messages:
            return ()
        told = tuple(f"rank {rank}: {message}" for rank, message in self.messages)
        if self.code is None:
            return (*told, f"the ranks did not end in time and were stopped\n{self.log}".rstrip())
        return told or (f"the ranks ended with exit code {self.code}\n{self.log}".rstrip(),)


def run_ranks(
    count: int, arguments: Sequence[str], *, timeout: float, env: dict[str, str] | None = None, cwd: str | None = None
) -> RanksEnd:
    """Run ``python ARGUMENTS`` on ``count`` ranks of this machine (a script, or ``-m`` and a module).

    Args:
        timeout: seconds until all of them are stopped.
        env: added to this process's environment.
    """
    with tempfile.TemporaryDirectory(prefix="fxpar-ranks-") as folder:
        log = Path(folder) / "log"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count),
            "--redirects", "2", "--log-dir", f"{folder}/ranks",
        ]  # fmt: skip
        # a rank that dies of a signal leaves no message of its own: its threads' stacks are all there is to see
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(env or {}), FOLDER: folder}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*command, *arguments], env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=stream, start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # the launcher's session holds every rank; a rank that outlives the launcher must not stay behind
                stop_session(process)
        messages = []
        for rank in range(count):
            path = Path(folder) / f"rank{rank}"
            if path.exists():
                messages.append((rank, path.read_text().removeprefix("fxpar: ")))
        lines = _last_lines(log, 30)
        for path in sorted((Path(folder) / "ranks").glob("**/stderr.log")):
            last = _last_lines(path, 30)
            lines += [f"rank {path.parent.name} wrote:", *last] if last else []
        return RanksEnd(code, tuple(messages), "\n".join(lines))


def _last_lines(path: Path, count: int) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-count:]


def stop_session(process: subprocess.Popen[bytes]) -> None:
    """End a process started with ``start_new_session`` and all that it started."""
    with suppress(ProcessLookupError):  # all of them have ended already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report_failure(run: Callable[[], None]) -> int:
    """Run the body of a rank; what it raises is written down for :func:`run_ranks`. Returns the exit code."""
    try:
        run()
        return 0
    except FxparError as error:
        message = str(error)
    except Exception as error:
        message = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK", "0")
    if folder is not None:
        part = Path(folder) / f"rank{rank}.part"
        part.write_text(message)
        part.rename(part.with_suffix(""))
    print(message, file=sys.stderr)
    return 1


def end_as_rank(run: Callable[[], None]) -> NoReturn:
    """Run the body of a rank and end the process.

    It ends without the interpreter's own end. A rank that failed must not wait there for the others. A rank that did
    not must not be killed there: a thread of gloo may still hold the tensors of its last collective, and letting go of
    them while the interpreter shuts down aborts the process (SIGABRT; pytorch/pytorch#179291).
    """
    code = report_failure(run)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
