"""Known mistakes: name, passage of solution.py, what replaces it, check that refuses it, what that
check says."""

MISTAKES = [
    (
        "no wait for its own send",
        (
            "def ring_shift(",
            "    for work in dist.batch_isend_irecv([out, into]):\n        work.wait()\n",
        ),
        (
            "pending = []\n\n\ndef ring_shift(",
            "    pending.extend(dist.batch_isend_irecv([out, into]))\n    pending[-1].wait()\n",
        ),
        "test_all_at_once",
        "came back while its x was still being sent",
    ),
    (
        "no wait for what comes",
        "        work.wait()\n",
        "        pass\n",
        "test_values",
        "came back before anything can have come: wait for the work",
    ),
    (
        "even ranks send first",
        (
            "    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)\n"
            "    into = dist.P2POp(dist.irecv, came, (rank - shift) % n)\n"
            "    for work in dist.batch_isend_irecv([out, into]):\n"
            "        work.wait()\n"
        ),
        (
            "    if rank % 2 == 0:\n"
            "        dist.send(x.contiguous(), (rank + shift) % n)\n"
            "    dist.recv(came, (rank - shift) % n)\n"
            "    if rank % 2 == 1:\n"
            "        dist.send(x.contiguous(), (rank + shift) % n)\n"
        ),
        "test_values",
        "not every rank has come back",
    ),
    (
        "everybody sends first",
        (
            "    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)\n"
            "    into = dist.P2POp(dist.irecv, came, (rank - shift) % n)\n"
            "    for work in dist.batch_isend_irecv([out, into]):\n"
            "        work.wait()\n"
        ),
        (
            "    dist.send(x.contiguous(), (rank + shift) % n)\n"
            "    dist.recv(came, (rank - shift) % n)\n"
        ),
        "test_values",
        "waits in send, called from",
    ),
    (
        "the last rank receives first",
        (
            "    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)\n"
            "    into = dist.P2POp(dist.irecv, came, (rank - shift) % n)\n"
            "    for work in dist.batch_isend_irecv([out, into]):\n"
            "        work.wait()\n"
        ),
        (
            "    first = rank < (rank + shift) % n\n"
            "    if first:\n"
            "        dist.send(x.contiguous(), (rank + shift) % n)\n"
            "    dist.recv(came, (rank - shift) % n)\n"
            "    if not first:\n"
            "        dist.send(x.contiguous(), (rank + shift) % n)\n"
        ),
        "test_all_at_once",
        "rank 0 has not started its recv while rank 1 is away: start both, then wait",
    ),
    (
        "all gathered, and one picked",
        (
            "    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)\n"
            "    into = dist.P2POp(dist.irecv, came, (rank - shift) % n)\n"
            "    for work in dist.batch_isend_irecv([out, into]):\n"
            "        work.wait()\n"
            "    return came\n"
        ),
        (
            "    every = [torch.empty_like(came) for _ in range(n)]\n"
            "    dist.all_gather(every, x.contiguous())\n"
            "    return every[(rank - shift) % n]\n"
        ),
        "test_values",
        "the answer calls all_gather; use send, recv",
    ),
    (
        "one hop after another",
        (
            "    came = torch.empty_like(x, memory_format=torch.contiguous_format)\n"
            "    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)\n"
            "    into = dist.P2POp(dist.irecv, came, (rank - shift) % n)\n"
            "    for work in dist.batch_isend_irecv([out, into]):\n"
            "        work.wait()\n"
        ),
        (
            "    came = x.contiguous()\n"
            "    step = 1 if shift > 0 else -1\n"
            "    for _ in range(abs(shift)):\n"
            "        out = came\n"
            "        came = torch.empty_like(out)\n"
            "        work = dist.isend(out, (rank + step) % n)\n"
            "        dist.recv(came, (rank - step) % n)\n"
            "        work.wait()\n"
        ),
        "test_cost",
        "rank 0 of 3, shift 2: sends to ranks: expected [2], got [1, 1]",
    ),
    (
        "received as float32",
        "came = torch.empty_like(x, memory_format=torch.contiguous_format)",
        "came = torch.empty(x.shape)",
        "test_tensors",
        "shift 1, contiguous int32: what comes from rank",
    ),
    (
        "received into x",
        (
            "came = torch.empty_like(x, memory_format=torch.contiguous_format)",
            "x.contiguous(), (rank",
        ),
        ("came = x", "x.clone(), (rank"),
        "test_values",
        "x was changed; it is the caller's",
    ),
    (
        "x itself returned where nothing moves",
        "return x.clone(memory_format=torch.contiguous_format)",
        "return x",
        "test_values",
        "shift 2, contiguous float32: what it returns shares x's memory",
    ),
    (
        "sent as float32",
        (
            "    came = torch.empty_like(x, memory_format=torch.contiguous_format)\n",
            "    return came\n",
        ),
        (
            "    dtype = x.dtype\n    x = x.float()\n"
            "    came = torch.empty_like(x, memory_format=torch.contiguous_format)\n",
            "    return came.to(dtype)\n",
        ),
        "test_tensors",
        "shift 1, contiguous int32: what comes from rank",
    ),
    (
        "sent to everybody",
        (
            "    came = torch.empty_like(x, memory_format=torch.contiguous_format)\n"
            "    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)\n"
            "    into = dist.P2POp(dist.irecv, came, (rank - shift) % n)\n"
            "    for work in dist.batch_isend_irecv([out, into]):\n"
            "        work.wait()\n"
            "    return came\n"
        ),
        (
            "    x = x.contiguous()\n"
            "    every = [torch.empty_like(x) for _ in range(n)]\n"
            "    others = [r for r in range(n) if r != rank]\n"
            "    works = [dist.isend(x, r) for r in others]\n"
            "    works += [dist.irecv(every[r], r) for r in others]\n"
            "    for work in works:\n"
            "        work.wait()\n"
            "    return every[(rank - shift) % n]\n"
        ),
        "test_cost",
        "rank 0 of 3, shift 1: sends to ranks: expected [1], got [1, 2]",
    ),
    (
        "sent to itself",
        ("    if shift % n == 0:\n        return x.clone(memory_format=torch.contiguous_format)\n"),
        "",
        "test_values",
        "it sends to itself; gloo has no such connection",
    ),
    (
        "shifted the other way",
        ("x.contiguous(), (rank + shift)", "came, (rank - shift)"),
        ("x.contiguous(), (rank - shift)", "came, (rank + shift)"),
        "test_values",
        "shift 1, contiguous float32: expected the tensor of rank",
    ),
    (
        "only contiguous tensors sent",
        "x.contiguous(), (rank",
        "x, (rank",
        "test_tensors",
        "input tensor has to be contiguous",
    ),
    (
        "x itself made contiguous",
        "    if shift % n == 0:\n",
        "    x.data = x.contiguous()\n    if shift % n == 0:\n",
        "test_tensors",
        "shift 1, transposed int32: x was given other memory or strides; it is the caller's",
    ),
    (
        "one buffer for all calls",
        (
            "def ring_shift(",
            "    came = torch.empty_like(x, memory_format=torch.contiguous_format)\n",
        ),
        (
            "buffers = {}\n\n\ndef ring_shift(",
            "    if (x.shape, x.dtype) not in buffers:\n"
            "        buffers[x.shape, x.dtype] = torch.empty(x.shape, dtype=x.dtype)\n"
            "    came = buffers[x.shape, x.dtype]\n",
        ),
        "test_values",
        "it shares memory with what an earlier call returned",
    ),
    (
        "two ranks take turns",
        "    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)\n",
        (
            "    first = rank == 0\n"
            "    if n == 2:\n"
            "        if first:\n"
            "            dist.send(x.contiguous(), (rank + shift) % n)\n"
            "        dist.recv(came, (rank - shift) % n)\n"
            "        if not first:\n"
            "            dist.send(x.contiguous(), (rank + shift) % n)\n"
            "        return came\n"
            "    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)\n"
        ),
        "test_all_at_once",
        "rank 1 has not started its send while rank 0 is away: start both, then wait",
    ),
    (
        "all at once for a shift of 1 only",
        "    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)\n",
        (
            "    first = rank < (rank + shift) % n\n"
            "    if shift != 1:\n"
            "        if first:\n"
            "            dist.send(x.contiguous(), (rank + shift) % n)\n"
            "        dist.recv(came, (rank - shift) % n)\n"
            "        if not first:\n"
            "            dist.send(x.contiguous(), (rank + shift) % n)\n"
            "        return came\n"
            "    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)\n"
        ),
        "test_all_at_once",
        "rank 0 has not started its recv while rank 2 is away: start both, then wait",
    ),
    (
        "sent as it lies in memory",
        (
            "    came = torch.empty_like(x, memory_format=torch.contiguous_format)\n",
            "dist.isend, x.contiguous(),",
            "dist.irecv, came,",
            "    return came\n",
        ),
        (
            "    came = torch.empty_like(x)\n"
            "    turned = x.dim() == 2 and not x.is_contiguous() and x.t().is_contiguous()\n",
            "dist.isend, x.t() if turned else x.contiguous(),",
            "dist.irecv, came.t() if turned else came,",
            "    return came.contiguous()\n",
        ),
        "test_tensors",
        "transposed on rank 0 alone int32: what comes from rank",
    ),
    (
        "an empty message first where there are two ranks",
        "    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)\n",
        (
            "    if n == 2:\n"
            "        none = x.new_empty(0)\n"
            "        dist.send(none, 0) if rank else dist.recv(none, 1)\n"
            "    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)\n"
        ),
        "test_cost",
        "rank 0 of 2, shift 1: messages received: expected 1, got 2",
    ),
    (
        "two buffers in turn, so that the third call overwrites what the first returned",
        (
            "def ring_shift(",
            "    came = torch.empty_like(x, memory_format=torch.contiguous_format)\n",
        ),
        (
            "pairs = {}\n\n\ndef ring_shift(",
            "    if (x.shape, x.dtype) not in pairs:\n"
            "        pairs[x.shape, x.dtype] = [torch.empty_like(x) for _ in '12']\n"
            "    pairs[x.shape, x.dtype].reverse()\n"
            "    came = pairs[x.shape, x.dtype][0]\n",
        ),
        "test_values",
        "it shares memory with what an earlier call returned",
    ),
]
