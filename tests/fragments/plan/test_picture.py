"""The picture of a plan has every placement, program, fragment, loop and transfer of it, each where it belongs."""

import collections
import dataclasses
import html.parser
import itertools
import xml.etree.ElementTree as ET

import pytest

import msrl_jax as msrl
from msrl_jax.fragments.plan.cost import FragmentPlan
from msrl_jax.fragments.plan.picture import page_of
from msrl_jax.fragments.plan.plan import Crossing, HostCallPlan, Plan, ProgramPlan, RegisterPlan
from msrl_jax.fragments.plan.text import group_crossings
from tests.support import toy
from tests.support.slow import mostly_slow

SVG = "{http://www.w3.org/2000/svg}"


def things(picture, kind):
    return [element for element in picture.iter(f"{SVG}g") if f"data-{kind}" in element.attrib]


def names(picture, kind):
    return collections.Counter(element.get(f"data-{kind}") for element in things(picture, kind))


def frame(element):
    """The left, upper, right and lower end of the first rectangle of a group."""
    x, y, width, height = (float(element.find(f".//{SVG}rect").get(key)) for key in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def is_inside(one, other):
    return other[0] <= one[0] and other[1] <= one[1] and one[2] <= other[2] and one[3] <= other[3]


def check(plan):
    picture = ET.fromstring(plan.svg())
    assert names(picture, "placement") == collections.Counter([*plan.placements])
    assert names(picture, "program") == collections.Counter(p.name for p in plan.programs)
    assert names(picture, "fragment") == collections.Counter(f.name for f in plan.fragments)
    assert names(picture, "loop") == collections.Counter("+".join(loop.fragments) for loop in plan.loops)
    assert names(picture, "registers") == collections.Counter({r.placement for r in plan.registers})
    arrows = [(g.get("data-source"), g.get("data-destination"), g.get("data-crossing")) for g in things(picture, "crossing")]
    assert sorted(arrows) == sorted((c[0].source, c[0].destination, name) for name, c in group_crossings(plan.crossings))
    lanes = {g.get("data-placement"): frame(g) for g in things(picture, "placement")}
    boxes = [(frame(g), program) for g, program in zip(things(picture, "program"), plan.programs, strict=True)]
    for box, program in boxes:
        assert is_inside(box, lanes[program.placement])
    for one, other in itertools.combinations([box for box, _ in boxes], 2):
        assert one[3] < other[1]  # in the order in which they run
    for g, loop in zip(things(picture, "loop"), plan.loops, strict=True):
        inside = [program for box, program in boxes if is_inside(box, frame(g))]
        assert {name for program in inside for name in program.name.split("+")} <= set(loop.fragments) and inside
    for g in things(picture, "crossing"):
        line = g.find(f"{SVG}line")
        start, end = float(line.get("x1")), float(line.get("x2"))
        source, destination = lanes[g.get("data-source")], lanes[g.get("data-destination")]
        assert source[0] < start < source[2] and destination[0] < end < destination[2]
    return picture


@pytest.mark.parametrize("policy", mostly_slow(msrl.policies.names(), "Central"))
def test_a_picture_has_what_the_plan_has_where_it_belongs(policy):
    check(toy.program(policy).explain())


def test_delayed_parameters_are_boxes_where_they_are_kept():
    plan = toy.program("SingleLearnerCoarse:staleness=2").explain()
    assert plan.registers == (RegisterPlan("state.params['w']", "actors", 2 * 2 * 4, 2),)
    texts = [element.text for element in check(plan).iter(f"{SVG}text")]
    assert "registers: the last 2 values of" in texts


def made_up(names=("agent <0>", "agent 1", "agent 2", "host"), count=64):
    """A plan of as many placements, each with as many devices, a program and a transfer to the next."""
    devices = {name: tuple(f"tpu:{count * k + i}" for i in range(count)) for k, name in enumerate(names)}
    fragments = tuple(FragmentPlan(f"learn_{k}", "learner", name, count, 0, 10**9, 7) for k, name in enumerate(names))
    programs = tuple(ProgramPlan(f"learn_{k}", name, 7, 1, 1, 1, 0, ()) for k, name in enumerate(names[:-1]))
    value = "state.params['a & b']" * 9
    ways = itertools.pairwise(names)
    crossings = tuple(Crossing(value, "float32", (4,), *way, 256, 7, "bfloat16", 512) for way in ways)
    calls = (HostCallPlan(fragments[-1].name, 7, 16),)
    return Plan("MyPolicy(a='<b>')", devices, ("cpu:0",), 2, False, fragments, programs, crossings, (), (), calls)


def test_many_placements_and_devices_and_any_name_fit():
    plan = dataclasses.replace(made_up(), warnings=("actors wait for the learner " * 9,))
    texts = [element.text for element in check(plan).iter(f"{SVG}text")]
    assert "tpu:0 to tpu:63 (64 devices)" in texts and "called by the host" in texts and "idle: cpu:0" in texts
    assert any("parameters 2 iterations old" in text for text in texts)
    assert any(text.startswith("warning: actors wait for the learner") for text in texts)
    assert max(len(text) for text in texts if not text.startswith("warning")) < 100  # long names are cut
    check(dataclasses.replace(plan, placements={}, fragments=(), programs=(), crossings=(), host_calls=()))


def test_a_notebook_and_a_page_show_it_and_need_nothing_else():
    plans = [made_up(), made_up(("one",), 1)]
    assert plans[0]._repr_html_() == plans[0].svg()
    page = page_of(plans, "a < b")

    tags = collections.Counter()

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags[tag] += 1
            assert not {"src", "href"} & dict(attrs).keys()

    Reader().feed(page)
    assert tags["svg"] == tags["figure"] == tags["pre"] == 2 and "<title>a &lt; b</title>" in page
    assert not {"script", "link", "img"} & tags.keys()
