"""What several files of tests change in lessons: (the passage, what it becomes)."""

LAUNCHING = "fundamentals/02_launching_processes.py"
SURVIVING = "fundamentals/07_training_that_survives.py"
STARTS_PROCESSES = {  # sections of rank 0 that start processes of their own
    "fundamentals/00_check_your_machine.py": [
        ("    every_gpu_joins()\n", ""),
        ("    failures_are_recognised()\n", ""),
    ],
    LAUNCHING: [
        ("    say_hello()\n", ""),
        ("    a_launcher_by_hand()\n", ""),
        ("    two_torchruns_make_one_world()\n", ""),
        ("    fork_and_spawn()\n", ""),
    ],
    "fundamentals/05_several_nodes.py": [
        ("    operator = start_operator() if RANK == 0 else None\n", ""),
        ('    check_virtual_nodes(operator, weights, device.type == "cpu")\n', ""),
    ],
    SURVIVING: [('        check_a_real_death(folder / "sigkill")\n', "")],
}

# FFCV's pipelines in plain Python: the same values, without seconds of compiling on every rank.
NO_JIT = ('os.environ["NUMBA_OPT"] = "0"', 'os.environ["NUMBA_DISABLE_JIT"] = "1"')
