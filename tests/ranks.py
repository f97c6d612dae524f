"""Starts the processes of a test over ``torch.distributed``."""

import os
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).parent / "torch_side" / "distributed_worker.py"


def run_ranks(test: str, world: int, device: str, folder: Path) -> None:
    """One process a rank; the first that fails is shown."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(WORKER)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), str(folder / "store"), device, test], stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(world)
    ]
    try:
        texts = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [text[-3000:] for rank, text in zip(ranks, texts) if rank.returncode]
    assert not failed, failed[0]
