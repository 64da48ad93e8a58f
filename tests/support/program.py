"""What the instructions of a program depend on."""

from msrl_jax.fragments.passes.instructions import RunProgram, walk


def dependencies(program, staleness):
    """For each (iteration, instruction) of a run, the pairs (iteration, fragment) that it depends on."""
    held = {v: frozenset() for copies in program.schedule.inputs for v in copies}
    depends = {}
    for iteration in range(staleness + 3):
        here = dict(held)
        for i, _ in walk(program.instructions):
            before = frozenset().union(*(here.get(v, frozenset()) for v in i.reads()))
            if isinstance(i, RunProgram):
                for fragment in i.fragments:
                    depends[iteration, fragment] = before
                before |= {(iteration, f) for f in i.fragments}
            for v in i.makes():
                here[v] = before
        pairs = zip(program.schedule.inputs, program.schedule.outputs, strict=True)
        held = {v: here.get(w, frozenset()) for ins, outs in pairs for v, w in zip(ins, outs, strict=True)}
    return depends
