"""The order in which calls of the host and what waits for them run."""

import numpy as np

from msrl_jax.fragments.runtime.host_calls import HostQueue


def test_a_task_that_consumes_an_array_waits_for_those_that_read_it():
    order = []

    class Never:
        can_start = True

        def start(self):
            return lambda: [np.float32(1)]

    def note(name):
        return lambda *args: order.append(name) or [np.float32(len(args))]

    queue, shared = HostQueue(), np.zeros(3)
    (pending,) = queue.start(Never(), lambda made: made, [], 1)
    queue.call(note("reads"), [pending, shared], (), 1)
    queue.call(note("other"), [np.zeros(3)], (0,), 1)
    queue.call(note("consumes"), [shared], (0,), 1)
    assert order == ["other"]
    queue.drain()
    assert order == ["other", "reads", "consumes"]
