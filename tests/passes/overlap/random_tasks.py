"""Random task graphs with memory."""

import random

from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, Buffer, Task, TaskGraph


def random_tasks(seed: int, size: int) -> TaskGraph:
    dice = random.Random(seed)
    links = ["link0", "link1"][: dice.choice((1, 2))]
    tasks, readable = [], []
    while len(tasks) < size:
        recent = readable[-dice.choice((3, 6, 12)) :]
        needs = tuple(sorted(dice.sample(recent, min(len(recent), dice.choice((0, 1, 1, 2))))))
        here, seconds = len(tasks), dice.choice((0.5, 1.0, 2.0, 3.0, 5.0, 8.0))
        if dice.random() < 0.35:
            link = dice.choice(links)
            tasks += [
                Task(f"comm{here}", seconds, link, needs, link, "all_gather"),
                Task(f"wait{here}", 0.0, COMPUTE, (here,), kind="wait"),
            ]
        else:
            tasks.append(Task(f"work{here}", seconds, COMPUTE, needs))
        readable.append(len(tasks) - 1)
    users = TaskGraph(tasks).users
    buffers = []
    for i, task in enumerate(tasks):
        if task.kind == "wait":
            continue
        readers = set(users[i])
        for r in users[i]:  # the result of a wait is the transfer's buffer; a transfer reads its input until its wait
            readers |= set(users[r]) if tasks[r].kind == "wait" else {r + 1} if tasks[r].resource != COMPUTE else set()
        buffers.append(Buffer(i, dice.randrange(1, 9), tuple(sorted(readers)), kept=dice.random() < 0.1))
    return TaskGraph(tasks, buffers)
