"""Players in processes of their own that take turns, so that a noisy moment meets everyone."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from branch_players import Played, Work, open_player
from engine_lanes import Lanes, _receive, _set_threads, read_status, reset_peak

# What the players import, as far as that computes nothing.
_PRELOADED = ("torch", "transformers.models.llama.modeling_llama", "transformers.generation",
              "radixserve.api.runtime",
              "radixserve.runner.cpu_runner", "radixserve.models.decoder",
              "branch_attention", "branch_forks", "branch_players", "engine_peers")  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One run of one player."""

    wall_s: float
    cpu_s: float  # of all threads of the process
    peak_bytes: int | None
    played: Played


@dataclass(frozen=True)
class Record:
    """All turns of one player."""

    name: str
    turns: list[Turn]

    @property
    def played(self) -> Played:
        return self.turns[0].played

    @property
    def wall_s(self) -> float:
        return median(turn.wall_s for turn in self.turns)

    @property
    def cpu_s(self) -> float:
        return median(turn.cpu_s for turn in self.turns)

    @property
    def peak_bytes(self) -> int | None:
        peaks = [turn.peak_bytes for turn in self.turns if turn.peak_bytes is not None]
        return max(peaks, default=None)


class Stage(Lanes):
    """Opens players; `num_threads` holds for every library in their processes."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self._context.set_forkserver_preload(list(_PRELOADED))

    def take_turns(
        self, names: Sequence[str], work: Work, folder: Path, repeats: int
    ) -> dict[str, Record]:
        """Open everyone, warm up, then run them in turns. Every turn begins with nothing cached."""
        pipes: dict[str, Connection] = {}
        processes = []
        for name in names:
            mine, its = self._context.Pipe()
            arguments = (its, self._num_threads, name, work, folder)
            process = self._context.Process(target=_live, args=arguments, daemon=True)
            process.start()
            its.close()
            pipes[name] = mine
            processes.append(process)
        for name, pipe in pipes.items():  # has loaded and warmed up
            _receive(pipe, name)
        turns: dict[str, list[Turn]] = {name: [] for name in names}
        for at in range(repeats):
            for name in names if at % 2 == 0 else reversed(names):
                pipes[name].send(True)
                turns[name].append(_receive(pipes[name], name))
        for pipe, process in zip(pipes.values(), processes, strict=True):
            pipe.send(False)
            process.join()
        return {name: Record(name, turns[name]) for name in names}


def _live(pipe: Connection, num_threads: int, name: str, work: Work, folder: Path) -> None:
    """The life of a player's process."""
    _set_threads(num_threads)
    player = open_player(name, work, folder)
    player.play(work.shrunk())  # warms up
    gc.freeze()
    pipe.send(None)
    while pipe.recv():
        player.reset()
        gc.collect()
        reset_peak()
        cpu, wall = time.process_time(), time.perf_counter()
        played = player.play(work)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        pipe.send(Turn(wall, cpu, read_status("VmHWM"), played))
    player.close()
