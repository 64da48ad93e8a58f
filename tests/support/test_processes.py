import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support import processes

ASK = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
LEAVE = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True)"


def test_ctrl_c_reaches_processes_although_it_is_ignored_here():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert processes.run([sys.executable, "-c", ASK]).stdout == "True\n"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_no_process_outlives_its_test():
    process = processes.start([sys.executable, "-c", LEAVE], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    processes.end_all()
    state = Path(f"/proc/{pid}/stat")
    end = time.monotonic() + 10
    while state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)
