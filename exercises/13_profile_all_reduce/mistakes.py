"""Known mistakes: name, passage of solution.py, its replacement, the check, what it says."""

MISTAKES = [
    (
        "durations added up",
        "max(first, reached), min(last, end)",
        "max(first, start), min(last, end)",
        "test_covered",
        "covered([(0, 3), (2, 5), (4, 4.5), (9, 20)], 1, 10): expected 5.0, got 6.5",
    ),
    (
        "spans not clipped at the end",
        "max(first, reached), min(last, end)",
        "max(first, reached), last",
        "test_covered",
        "covered([(0, 3), (2, 5), (4, 4.5), (9, 20)], 1, 10): expected 5.0, got 15.0",
    ),
    (
        "a span that holds others forgotten",
        "        if last > first:\n            length, reached = length + last - first, last\n",
        "        length, reached = length + max(0, last - first), last\n",
        "test_covered",
        "covered([(0, 9), (2, 4), (6, 7)], 0, 10): expected 9.0, got",
    ),
    (
        "lengths rounded to half microseconds",
        "    return length\n",
        "    return round(2 * length) / 2\n",
        "test_covered",
        "], 10, 30): expected",
    ),
    (
        "what lies between the steps counted",
        "    for start, end in spans(steps):\n",
        "    starts, ends = zip(*spans(steps), strict=True)\n"
        "    for start, end in [(min(starts), max(ends))]:\n",
        "test_share",
        "three steps, and what lies between them: us of communication",
    ),
    (
        "events of all ranks",
        'e["ph"] == "X" and e["pid"] == rank',
        'e["ph"] == "X"',
        "test_share",
        "other ranks' events: us of communication: expected 40, got",
    ),
    (
        "all communication taken for exposed",
        "covered(spans(wire + busy), start, end) - covered(spans(busy), start, end)",
        "covered(spans(wire), start, end)",
        "test_share",
        "compute hides a part: us exposed: expected 20, got 40",
    ),
    (
        "milliseconds",
        "Share(communication, exposed, exposed / total)",
        "Share(communication / 1e3, exposed / 1e3, exposed / total)",
        "test_share",
        "compute hides nothing: us of communication: expected 30, got 0.03",
    ),
    (
        "launches taken for communication",
        'e["name"].startswith("gloo:")',
        '(e["name"].startswith("gloo:") or "allreduce" in e["name"])',
        "test_share",
        "launches and ranges on the CPU are neither: us of communication: expected 40, got",
    ),
    (
        "the CPU's work taken for compute",
        "    total = communication = exposed = 0.0\n",
        '    busy += [e for e in mine if e["name"].startswith("aten::")]\n'
        "    total = communication = exposed = 0.0\n",
        "test_share",
        "a GPU: what the CPU does is not compute: us exposed: expected 20, got",
    ),
    (
        "the mean of the steps' shares",
        (
            "    total = communication = exposed = 0.0\n",
            "        exposed += covered(spans(wire + busy)",
            "- covered(spans(busy), start, end)\n",
            "exposed / total)",
        ),
        (
            "    total = communication = exposed = 0.0\n    shares = []\n",
            "        alone = covered(spans(wire + busy)",
            "- covered(spans(busy), start, end)\n"
            "        exposed += alone\n"
            "        shares.append(alone / (end - start))\n",
            "sum(shares) / len(shares))",
        ),
        "test_share",
        "three steps, and what lies between them: of the step: expected 0.314641745, got",
    ),
    (
        "a duration wanted of every event",
        (
            'e["ph"] == "X" and e["pid"] == rank',
            '(e["name"], e["cat"]) == ',
            '[e for e in mine if e["cat"] == "kernel"]',
            'e["cat"] == "cpu_op" and',
        ),
        (
            'e["pid"] == rank',
            '(e["name"], e.get("cat")) == ',
            '[e for e in mine if e.get("cat") == "kernel"]',
            'e.get("cat") == "cpu_op" and',
        ),
        "test_share",
        "KeyError: 'dur'",
    ),
    (
        "the profiler never told of a step",
        "            profiler.step()\n",
        "",
        "test_record",
        "there is no trace at rank_",
    ),
    (
        "one range around the loop",
        "    with profile(schedule=plan, on_trace_ready=save) as profiler:\n"
        "        for batch in batches:\n"
        '            with span("step"):\n'
        "                step(batch)\n"
        "            profiler.step()\n",
        "    for batch in batches[:warmup]:\n"
        "        step(batch)\n"
        '    with profile() as profiler, span("step"):\n'
        "        for batch in batches[warmup:]:\n"
        "            step(batch)\n"
        "    profiler.export_chrome_trace(path)\n",
        "test_record",
        'ranges named "step" in its trace: expected 3, got',
    ),
    (
        "a trace from rank 0 alone",
        "            profiler.step()\n",
        "            profiler.step()\n    if dist.get_rank() > 0:\n        os.remove(path)\n",
        "test_record",
        "rank 1: there is no trace at rank_1.json",
    ),
    (
        "the range opened after the step",
        '            with span("step"):\n                step(batch)\n',
        '            step(batch)\n            with span("step"):\n                pass\n',
        "test_record",
        'the range "step" does not hold its step',
    ),
    (
        "the warm-up recorded",
        "    with profile(schedule=plan, on_trace_ready=save) as profiler:\n"
        "        for batch in batches:\n"
        '            with span("step"):\n'
        "                step(batch)\n"
        "            profiler.step()\n",
        "    with profile() as profiler:\n"
        "        for batch in batches[:warmup]:\n"
        "            step(batch)\n"
        "        for batch in batches[warmup:]:\n"
        '            with span("step"):\n'
        "                step(batch)\n"
        "    profiler.export_chrome_trace(path)\n",
        "test_record",
        "steps that its trace has seen: expected ['batch 2', 'batch 3', 'batch 4'], got "
        "['batch 0', 'batch 1', 'batch 2'",
    ),
    (
        "a barrier in each step",
        '            with span("step"):\n',
        '            dist.barrier()\n            with span("step"):\n',
        "test_record",
        "its calls: expected ['all_reduce', 'all_reduce', 'all_reduce', 'all_reduce', "
        "'all_reduce'], got ['barrier', 'all_reduce',",
    ),
    (
        "warm-up on extra steps",
        "    with profile(schedule=plan, on_trace_ready=save) as profiler:\n"
        "        for batch in batches:\n"
        '            with span("step"):\n'
        "                step(batch)\n"
        "            profiler.step()\n",
        "    for batch in batches[:warmup]:\n"
        "        step(batch)\n"
        "    with profile() as profiler:\n"
        "        for batch in batches:\n"
        '            with span("step"):\n'
        "                step(batch)\n"
        "    profiler.export_chrome_trace(path)\n",
        "test_record",
        "batches that step was called with: expected [0, 1, 2, 3, 4], got [0, 1, 0, 1, 2, 3, 4]",
    ),
    (
        "record_function instead of span",
        'with span("step"):',
        'with record_function("step"):',
        "test_record",
        'the ranges "step" are not made by span: Nsight Systems would not see them',
    ),
    (
        "the GPU's twin of each step taken for another step",
        '(e["name"], e["cat"]) == ("step", "user_annotation")',
        'e["name"] == "step"',
        "test_share",
        "a GPU: its twin of the step is no second step: us of communication: expected 40, got",
    ),
    (
        "nccl anywhere in a kernel's name",
        (
            'if e["name"].startswith("nccl")]\n',
            'if not e["name"].startswith("nccl")]',
        ),
        ('if "nccl" in e["name"]]\n', 'if "nccl" not in e["name"]]'),
        "test_share",
        "a GPU: a kernel is communication if its name begins with nccl: us of communication: "
        "expected 40, got 60",
    ),
    (
        "copies on the GPU taken for compute",
        'busy = [e for e in kernels if not e["name"].startswith("nccl")]',
        'copies = [e for e in mine if e["cat"] == "gpu_memcpy"]\n'
        '        busy = [e for e in kernels if not e["name"].startswith("nccl")] + copies',
        "test_share",
        "a GPU: copies are neither: us exposed: expected 20, got",
    ),
    (
        "gloo anywhere in an event's name",
        'e["name"].startswith("gloo:")',
        '"gloo:" in e["name"]',
        "test_share",
        "launches and ranges on the CPU are neither: us of communication: expected 40, got",
    ),
    (
        "all-reduces alone taken for communication",
        'e["name"].startswith("gloo:")',
        'e["name"].startswith("gloo:all_reduce")',
        "test_share",
        "communication of several kinds: us of communication: expected 40, got 10",
    ),
    (
        "events of one category alone taken for communication",
        'e["name"].startswith("gloo:")',
        'e["name"].startswith("gloo:") and e["cat"] == "user_annotation"',
        "test_share",
        "communication of several kinds: us of communication: expected 40, got 10",
    ),
    (
        "kernels of today's NCCL alone",
        (
            'if e["name"].startswith("nccl")]\n',
            'if not e["name"].startswith("nccl")]',
        ),
        (
            'if e["name"].startswith("ncclDevKernel")]\n',
            'if not e["name"].startswith("ncclDevKernel")]',
        ),
        "test_share",
        "a GPU: kernels of several kinds: us of communication: expected 40, got 10",
    ),
    (
        "matrix products alone taken for compute",
        'e["name"].startswith("aten::")',
        'e["name"].startswith("aten::mm")',
        "test_share",
        "compute hides a part: us exposed: expected 20, got 30",
    ),
    (
        "a GPU known by its communication",
        "    if kernels:\n",
        '    if any(e["name"].startswith("nccl") for e in kernels):\n',
        "test_share",
        "a GPU that does not communicate: us of communication: expected 0, got 70",
    ),
    (
        "a GPU known by its compute",
        "    if kernels:\n",
        '    if any(not e["name"].startswith("nccl") for e in kernels):\n',
        "test_share",
        "a GPU that does not compute: us of communication: expected 40, got 0",
    ),
    (
        "every range whose name begins with step",
        '(e["name"], e["cat"]) == ("step", "user_annotation")',
        'e["name"].startswith("step") and e["cat"] == "user_annotation"',
        "test_share",
        "launches and ranges on the CPU are neither: of the step: expected 0.2, got 0.153846154",
    ),
    (
        "a tuple without names",
        "return Share(communication, exposed, exposed / total)",
        "return communication, exposed, exposed / total",
        "test_share",
        "share: expected a Share, got tuple",
    ),
    (
        "every rank's events for rank 0",
        'e["ph"] == "X" and e["pid"] == rank',
        'e["ph"] == "X" and (not rank or e["pid"] == rank)',
        "test_many",
        "us of communication: expected",
    ),
    (
        "of gloo's events two categories alone",
        'if e["name"].startswith("gloo:")',
        'if e["name"].startswith("gloo:") and e["cat"] in ("cpu_op", "user_annotation")',
        "test_share",
        "three steps, and what lies between them: us of communication: expected",
    ),
    (
        "a GPU known by the kernels of any rank",
        "    if kernels:\n",
        '    if any(e["ph"] == "X" and e["cat"] == "kernel" for e in events):\n',
        "test_share",
        "other ranks' events: us of communication: expected 40, got 0",
    ),
    (
        "a GPU known by its kernels within the steps",
        "    if kernels:\n",
        "    if any(covered(spans([e]), a, b) for e in kernels for a, b in spans(steps)):\n",
        "test_share",
        "a GPU: its kernels lie outside the step: us of communication: expected 0, got 75",
    ),
]
