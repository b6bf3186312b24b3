"""Faults that a test must catch: ``python tests/project/mutations.py [-k WORD] [--list]``.

Each mutation is one small fault in a copy of the package, and the test that was seen to fail when it was first planted. The program plants
them one at a time, runs that test, and says what came of it:

    killed      the test failed, for the reason shown
    SURVIVED    the test passed: it no longer sees what it was written for
    STALE       the code has changed, and the fault no longer applies
    BROKEN      nothing was tested: the package does not import, a name is missing, or there is no such test

It exits with 1 unless every mutation is killed. The checkout is only read. A fault should be what somebody could write by mistake; when you
change the code that it is in, plant it again where the same mistake would now be made.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "pipes" / "penstock"
LIMIT_S = 120


@dataclass(frozen=True)
class Mutation:
    """One fault, and who must see it.

    Attributes:
        file: Relative to the package.
        old: Text that occurs once in ``file``.
        new: What stands there instead.
        test: A pytest node id; it passes without the fault.
    """

    file: str
    old: str
    new: str
    test: str

    def applied(self, source: str) -> str | None:
        """``source`` with the fault in it; None where ``old`` does not occur exactly once."""
        return source.replace(self.old, self.new) if source.count(self.old) == 1 else None

    def __str__(self) -> str:
        shown = [" ".join(text.split())[:60] or "(nothing)" for text in (self.old, self.new)]
        return f"{self.file}: {shown[0]} -> {shown[1]}  [{self.test}]"


MUTATIONS = [
    # Statistics and the report.
    Mutation(
        "_loader/report.py",
        "    if most == mapper.source_wait_s:",
        "    if False:",
        "tests/observe/test_report.py::test_a_slow_sampler_is_named",
    ),
    Mutation(
        "_loader/report.py",
        "seconds = (s.load.mean_s, s.transform.mean_s,",
        "seconds = (s.load.mean_s, 0.0,",
        "tests/observe/test_report.py::test_a_slow_transform_is_named[inline]",
    ),
    Mutation(
        "_loader/report.py",
        "s.collate.mean_s / max(1.0, per_batch))",
        "0.0)",
        "tests/observe/test_report.py::test_a_slow_collate_is_named[inline]",
    ),
    Mutation(
        "_loader/report.py",
        "if s.stall_share < _STALLED:",
        "if False:",
        "tests/observe/test_report.py::test_a_slow_training_step_is_named",
    ),
    Mutation(
        "_loader/report.py",
        "(s.lock_wait_share or 0) > _CONTENDED",
        "False",
        "tests/observe/test_report.py::test_threads_that_fight_for_the_lock_should_be_processes",
    ),
    Mutation(
        "_loader/report.py",
        "source_s + _typical_s(s) < _TINY_S",
        "False",
        "tests/observe/test_report.py::test_tiny_work_needs_no_workers[thread]",
    ),
    Mutation(
        "_loader/report.py",
        "workers.busy_share < _BUSY:\n        return",
        "False:\n        return",
        "tests/observe/test_report.py::test_too_little_is_loaded_ahead",
    ),
    Mutation(
        "_loader/report.py",
        "s.load_cpu_share < 1 - _BLOCKED",
        "False",
        "tests/observe/test_report.py::test_a_slow_disk_is_told_from_slow_computing[process]",
    ),
    Mutation(
        "_loader/report.py",
        "_late_share(s) > 0.5",
        "False",
        "tests/observe/test_report.py::test_a_straggling_sample_is_named[inline]",
    ),
    Mutation(
        "_loader/report.py",
        "if device is not None and most == device_s:",
        "if False:",
        "tests/observe/test_report.py::test_a_slow_copy_to_the_device_is_named",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "self._ended[worker.serial] = worker.area.meter.ended()\n        self._supervisor.stop",
        "pass\n        self._supervisor.stop",
        "tests/observe/test_statistics.py::test_it_counts_what_was_done[processes]",
    ),
    Mutation(
        "_workers/thread_pool.py",
        "    measuring.set(meter)\n",
        "",
        "tests/observe/test_statistics.py::test_it_counts_what_was_done[threads]",
    ),
    Mutation(
        "_nodes/watch.py",
        "attributes.update(timed)",
        "pass",
        "tests/observe/test_statistics.py::test_the_time_of_a_users_node_is_its_own",
    ),
    Mutation(
        "_workers/meter.py",
        "(fractions * 8).astype(np.int64) - 18",
        "(fractions * 8).astype(np.int64) - 17",
        "tests/observe/test_statistics.py::test_a_histogram_is_exact_to_an_eighth",
    ),
    Mutation(
        "_workers/meter.py",
        "self.plain = min(_MOST_PLAIN, _COST_NS // max(1, mean_ns))",
        "pass",
        "tests/observe/test_statistics.py::test_short_samples_are_measured_less_often",
    ),
    Mutation(
        "_loader/loop_clock.py",
        "self.report_ns, self.due = moment + self._every_ns, True",
        "self.due = True",
        "tests/observe/test_report.py::test_a_report_is_logged_every_so_often",
    ),
    # Random numbers and orders.
    Mutation(
        "_random/sample_rng.py",
        "mixed((epoch_word(seed, epoch) ^ position) + GAMMA)",
        "mixed(epoch_word(seed, epoch) + GAMMA)",
        "tests/fetch/test_fetch.py::test_a_sample_drawn_twice_in_an_epoch_is_augmented_twice",
    ),
    Mutation(
        "_random/splitmix.py",
        "STEPS: Final = ((30,",
        "STEPS: Final = ((29,",
        "tests/random/test_splitmix.py::test_splitmix64_is_the_published_one",
    ),
    Mutation(
        "_random/batch_rng.py",
        "return (words >> by) & ((1 << (64 - by)) - 1)",
        "return words >> by",
        "tests/random/test_splitmix.py::test_splitmix64_is_the_published_one",
    ),
    Mutation(
        "_random/orders.py",
        "generator.manual_seed(self._seed + epoch)",
        "generator.manual_seed(self._seed)",
        "tests/random/test_orders.py::TestTorchOrder::test_is_distributed_sampler_bit_for_bit",
    ),
    Mutation(
        "_random/permutation.py",
        "while out.size and out.max() >= self._n:",
        "while False:",
        "tests/random/test_orders.py::TestShuffledOrderIsAPermutation::test_of_every_length",
    ),
    Mutation(
        "_random/global_seeding.py",
        "        if drew:\n            self._calm = None\n",
        "        if drew:\n",
        "tests/random/test_global_seeding.py::test_a_batch_that_surprises_is_loaded_once_more_and_no_other_is",
    ),
    Mutation(
        "_random/global_seeding.py",
        "self._watch.put_back(before)",
        "pass",
        "tests/random/test_global_seeding.py::test_inline_loading_leaves_the_callers_generators_to_the_bit",
    ),
    Mutation(
        "_random/global_seeding.py",
        "        self._seen = None\n        with",
        "        with",
        "tests/random/test_global_seeding.py::test_small_batches_in_between_are_no_surprise",
    ),
    Mutation(
        "_random/global_seeding.py",
        "self._watch.look() if kept or self._seen is None else self._seen",
        "self._watch.look() if self._seen is None else self._seen",
        "tests/random/test_global_seeding.py::test_the_callers_draws_are_no_surprise",
    ),
    Mutation(
        "_random/global_seeding.py",
        "            self._judge()\n            self.seed",
        "            self.seed",
        "tests/random/test_global_seeding.py::test_seeding_for_collate_fn_hides_no_draw",
    ),
    Mutation(
        "_random/global_seeding.py",
        "            self.seed(epoch, ~position)",
        "            pass",
        "tests/random/test_global_seeding.py::test_draws_in_collate_fn",
    ),
    Mutation(
        "_fetch/task.py",
        "            self._seeding.seed(sample.epoch, sample.position)",
        "            pass",
        "tests/random/test_global_seeding.py::test_draws_in_on_error",
    ),
    Mutation(
        "_random/global_seeding.py",
        "drew = self._seen != before",
        "drew = False",
        "tests/random/test_global_seeding.py::test_a_sample_is_the_same_seeded_or_watched",
    ),
    Mutation(
        "_random/global_seeding.py",
        "noted = kept and note_watched(before)",
        "noted = False",
        "tests/loader/test_interrupts.py::test_an_interrupt_while_draws_are_found_leaves_the_programs_generators[Stop]",
    ),
    Mutation(
        "_loader/loader.py",
        "                    loader._lost_if_moved()\n                    put_back_interrupted()\n",
        "                    loader._lost_if_moved()\n",
        "tests/loader/test_interrupts.py::test_an_interrupt_while_draws_are_found_leaves_the_programs_generators[ValueError]",
    ),
    Mutation(
        "_random/global_rng.py",
        "memory[has_double] and memory[double]",
        "0",
        "tests/random/test_global_seeding.py::test_the_generator_of_torch_is_found",
    ),
    Mutation(
        "_random/global_rng.py",
        "            memory[has] = bool(deviate)",
        "            pass",
        "tests/random/test_global_seeding.py::test_the_generator_of_torch_is_found",
    ),
    Mutation(
        "_random/global_rng.py",
        "        if not probe.get_state().equal(true):",
        "        if False:",
        "tests/random/test_global_seeding.py::test_where_torch_keeps_its_generator_elsewhere_it_is_asked",
    ),
    Mutation(
        "_fetch/sample.py",
        "        self._last = n - 1",
        "        self._last = n",
        "tests/fetch/test_error_policy.py::test_an_error_has_its_type_its_traceback_and_its_address",
    ),
    Mutation(
        "_fetch/task.py",
        "meter.plain and _Task.__call__ is _UNTRACED and",
        "meter.plain and",
        "tests/observe/test_trace.py::test_every_batch_wait_and_epoch_is_there",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "            window.push(Entry(None, job, state))",
        "            pass",
        "tests/nodes/test_parallel_mapper.py::test_ctrl_c_loses_no_item_inline",
    ),
    Mutation(
        "_random/global_rng.py",
        "if state[3] or ",
        "if ",
        "tests/random/test_global_seeding.py::test_where_a_deviate_is_kept_nothing_is_said",
    ),
    Mutation(
        "_random/rng_state.py",
        "tuple(words), deviate)",
        "tuple(words), None)",
        "tests/random/test_rng_state.py::test_a_loop_that_draws_resumes_bit_for_bit[inline]",
    ),
    # Memory.
    Mutation(
        "_memory/slots.py",
        "weakref.KeyedRef(base, self._freed.append, number)",
        "weakref.KeyedRef(base, self._freed.append, number)\n        self._freed.append(self._watches[number])",
        "tests/memory/test_recycler.py::test_batches_that_live_at_once_never_overlap",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "_SOME if size <= 2**20 else _FEW",
        "_FEW",
        "tests/nodes/test_parallel_mapper.py::test_the_larger_the_first_item_the_fewer_are_in_work",
    ),
    Mutation(
        "_fetch/fetch.py",
        "return self._collate_fn(self._samples)",
        "return __import__('copy').deepcopy(self._collate_fn(self._samples))",
        "tests/memory/test_recycler.py::test_what_a_collate_fn_returns_is_handed_over",
    ),
    Mutation(
        "_memory/parcel.py",
        "            if place > start:",
        "            if place > start and not self._kind:",
        "tests/memory/test_recycler.py::test_a_collate_fn_may_change_later_what_it_returned",
    ),
    Mutation(
        "_memory/parcel.py",
        "if len(set(map(id, tensors))) != len(tensors):",
        "if False:",
        "tests/memory/test_recycler.py::test_a_collate_fn_may_change_later_what_it_returned",
    ),
    Mutation(
        "_memory/parcel.py",
        "or one.__dict__:",
        "or False:",
        "tests/memory/test_recycler.py::test_a_collate_fn_may_change_later_what_it_returned",
    ),
    Mutation(
        "_memory/parcel.py",
        "end = aligned(end) + length",
        "end = aligned(end)",
        "tests/workers/test_process_pool.py::test_every_kind_of_value_arrives",
    ),
    Mutation(
        "_memory/tree.py",
        "return _like(tree, [",
        "return tuple([",
        "tests/nodes/test_to_device.py::test_a_tree_keeps_its_form",
    ),
    Mutation(
        "_memory/recycler.py",
        "if nbytes < LARGE:",
        "if True:",
        "tests/memory/test_recycler.py::test_memory_is_used_again",
    ),
    # The number of workers.
    Mutation(
        "_workers/processes/scheduler.py",
        "            if worker.worker >= self.size and not worker.held:\n",
        "            if worker.worker >= self.size:\n",
        "tests/workers/test_resize.py::test_a_pool_grows_and_shrinks_and_loses_nothing[fork]",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "        needed = worker.worker < self.size ",
        "        needed = True ",
        "tests/workers/test_resize.py::test_a_worker_that_is_killed_as_it_leaves_is_not_replaced",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "if self.ended or os.getpid() != self.owner:",
        "if self.closed or os.getpid() != self.owner:",
        "tests/loader/test_interrupts.py::test_an_interrupt_at_any_line_of_close_leaves_nothing_to_the_next_close_or_to_the_collector[close-processes]",
    ),
    Mutation(
        "_workers/processes/launchers.py",
        "    try:\n        process.start()\n",
        "    try:\n        with signals_held():\n            process.start()\n",
        "tests/workers/test_process_pool.py::test_the_fork_server_has_the_signal_mask_of_the_program",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "            except (OSError, RuntimeError) as error:  # a dead",
        "            except WorkerDied as error:  # a dead",
        "tests/workers/test_resize.py::test_a_pool_takes_the_processes_that_there_is_room_for",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "            if self._resized:\n                self._dismiss()\n",
        "",
        "tests/workers/test_resize.py::test_a_pool_grows_and_shrinks_and_loses_nothing[fork]",
    ),
    Mutation(
        "_workers/thread_pool.py",
        "        core.wake(len(core.cells) if core.stopped else core.leaving)  # again",
        "        # again",
        "tests/workers/test_resize.py::test_idle_threads_leave[True]",
    ),
    Mutation(
        "_workers/thread_pool.py",
        "len(core.cells) if core.stopped else core.leaving)  # again",
        "core.leaving)  # again",
        "tests/workers/test_thread_pool.py::test_a_jump_while_another_thread_closes_the_pool_leaves_no_thread",
    ),
    Mutation(
        "_workers/thread_pool.py",
        "            self._started = False  # first:",
        "            # first:",
        "tests/workers/test_resize.py::test_a_pool_grows_and_shrinks_and_loses_nothing[thread]",
    ),
    Mutation(
        "_workers/thread_pool.py",
        "        core.wake(core.leaving)\n",
        "",
        "tests/workers/test_resize.py::test_idle_threads_leave[False]",
    ),
    Mutation(
        "_workers/thread_pool.py",
        "            core.threads = {number: thread for number, thread in core.threads.items() if thread.ident is not None}\n",
        "",
        "tests/workers/test_resize.py::test_a_pool_takes_the_threads_that_there_is_room_for",
    ),
    Mutation(
        "_workers/auto.py",
        "            if gain < min(_GAIN, ideal / 2):\n                if self._is_doubtful():\n                    return self.number\n",
        "            if gain < min(_GAIN, ideal / 2):\n",
        "tests/workers/test_auto.py::test_one_odd_measurement_changes_nothing",
    ),
    Mutation(
        "_workers/auto.py",
        "            if gain < min(_GAIN, ideal / 2):\n",
        "            if gain < 0:\n",
        "tests/workers/test_auto.py::test_the_numbers_that_it_takes[what does not help is given back]",
    ),
    Mutation(
        "_workers/auto.py",
        "        self._patience *= 2\n",
        "",
        "tests/workers/test_auto.py::test_it_takes_longer_to_be_moved_each_time",
    ),
    Mutation(
        "_workers/auto.py",
        "        number = max(found.need, self._before + 1)\n",
        "        number = found.workers\n",
        "tests/workers/test_auto.py::test_the_numbers_that_it_takes[too many, of whom some are idle]",
    ),
    Mutation(
        "_workers/auto.py",
        "        if found.most < self.number:\n",
        "        if False:\n",
        "tests/workers/test_auto.py::test_less_room_is_heeded_at_once_and_more_is_used",
    ),
    Mutation(
        "_workers/auto.py",
        "        if self._high - self._low > 2:\n",
        "        if False:\n",
        "tests/workers/test_auto.py::test_the_numbers_that_it_takes[a disk that five saturate]",
    ),
    Mutation(
        "_workers/auto.py",
        "        if self._odd < self._patience:\n",
        "        if True:\n",
        "tests/workers/test_auto.py::test_it_follows_a_loop_that_becomes_faster_and_slower",
    ),
    Mutation(
        "_workers/limits.py",
        "(mount / above for above in (group, *group.parents))",
        "(mount / group,)",
        "tests/workers/test_limits.py::test_cores_and_memory[version 2, limits above]",
    ),
    Mutation(
        "_workers/limits.py",
        "most[0] - used[0] + cached[0]",
        "most[0] - used[0]",
        "tests/workers/test_limits.py::test_cores_and_memory[version 1, limits above]",
    ),
    Mutation(
        "_nodes/auto_workers.py",
        "                self._skip = max(self._skip, depth)\n",
        "                pass\n",
        "tests/nodes/test_auto_workers.py::test_pauses_are_no_steps",
    ),
    Mutation(
        "_nodes/auto_workers.py",
        "            if pool.all_ready:\n",
        "            if True:\n",
        "tests/nodes/test_auto_workers.py::test_nothing_is_measured_while_workers_start",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "            number = pool.resize(wanted)\n",
        "            self.num_workers = wanted\n            number = pool.resize(wanted)\n",
        "tests/nodes/test_auto_workers.py::test_ctrl_c_in_the_middle_of_a_change_loses_no_batch[fork]",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "            self._most_under_way = self._depth(number)\n            auto.resized",
        "            auto.resized",
        "tests/nodes/test_auto_workers.py::test_what_is_loaded_ahead_follows_the_number_of_workers",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        '            if method == "process" and isinstance(map_fn, Fetch) and map_fn.lanes:\n',
        "            if False:\n",
        "tests/nodes/test_auto_workers.py::test_lanes_have_owners_so_their_number_must_be_given",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "ProcessPool(self._work, self.num_workers, most",
        "ProcessPool(self._work, 1, most",
        "tests/nodes/test_auto_workers.py::test_a_dataset_changed_in_between_is_loaded_anew_by_as_many",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "        if needed:\n            self._supervisor.launch(worker.worker)\n",
        "",
        "tests/workers/test_resize.py::test_workers_that_are_killed_as_the_pool_grows_are_replaced[fork]",
    ),
    Mutation(
        "_workers/auto.py",
        "found.need < self.number and (base.stall > TARGET or found.need < base.need)",
        "found.need < self.number",
        "tests/workers/test_auto.py::test_constant_measurements_settle_after_a_bounded_number_of_changes",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "            auto.resized(number, wanted, self._most_under_way)\n",
        "            auto.resized(number, wanted, self._most_under_way)\n            pool.discard()\n",
        "tests/nodes/test_auto_workers.py::test_the_number_changes_nothing_else[thread]",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "            auto.resized(number, wanted, self._most_under_way)\n",
        "            auto.resized(number, wanted, self._most_under_way)\n            pool.discard()\n",
        "tests/nodes/test_auto_workers.py::test_it_resumes_at_every_step_while_it_grows_and_shrinks",
    ),
    Mutation(
        "_nodes/auto_workers.py",
        "        if share > _COMPUTES:\n",
        "        if True:\n",
        "tests/nodes/test_auto_workers.py::test_it_adds_workers_for_samples_that_wait_and_says_why",
    ),
    Mutation(
        "_workers/auto.py",
        "        stalled = found.stall > TARGET\n",
        "        stalled = True\n",
        "tests/nodes/test_auto_workers.py::test_a_loop_that_is_slower_than_one_worker_keeps_one",
    ),
    Mutation(
        "_loader/report.py",
        "    if choice is not None and choice.settled:\n        return",
        "    if False:\n        return",
        "tests/nodes/test_auto_workers.py::test_a_report_does_not_advise_what_was_tried",
    ),
    Mutation(
        "_observe/compare.py",
        ' if not getattr(node, "auto", False)), default=0)',
        "), default=0)",
        "tests/nodes/test_auto_workers.py::test_a_comparison_does_not_take_the_first_number_for_the_users",
    ),
    Mutation(
        "_nodes/auto_workers.py",
        "        return self.ahead_bytes + max(",
        "        return max(",
        "tests/nodes/test_auto_workers.py::test_memory_bounds_it[two each]",
    ),
    # Workers: life, and no hang.
    Mutation(
        "_workers/processes/scheduler.py",
        "elif spent:",
        "elif False:",
        "tests/workers/test_process_pool.py::test_the_budget_ends_in_an_error",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "in reversed([task for task in tasks if not task.job.done]):",
        "in [task for task in tasks if not task.job.done]:",
        "tests/workers/test_task_table.py::TestAgainstLists",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "self._queue(task.owner).appendleft(task)",
        "self._queue(task.owner).append(task)",
        "tests/workers/test_task_table.py::test_what_a_dead_worker_held_comes_first_and_in_its_order",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "        task.fatal_rows.add(row)\n",
        "        task.fatal_rows = {row}\n",
        "tests/workers/test_task_table.py::test_the_same_row_of_the_same_task_is_to_blame_the_second_time",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "fatal_rows: set[int] = field(default_factory=set)",
        "fatal_rows: set[int] = field(default_factory=lambda rows=set(): rows)",
        "tests/workers/test_task_table.py::test_the_same_row_of_the_same_task_is_to_blame_the_second_time",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "        task.fatal_rows.add(row)\n",
        "",
        "tests/workers/test_task_table.py::test_the_same_row_of_the_same_task_is_to_blame_the_second_time",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "        if job.done:\n            return\n",
        "",
        "tests/workers/test_task_table.py::TestAgainstLists",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "        self._wanted.clear()\n        self._backlog.clear()\n",
        "        self._wanted.clear()\n",
        "tests/workers/test_task_table.py::TestAgainstLists",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "        if self.failure is not None:\n",
        "        if False:\n",
        "tests/workers/test_task_table.py::test_fail_ends_what_is_to_come_too",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "        self._backlog, self.owned = deque(), {}\n",
        "",
        "tests/workers/test_task_table.py::TestAgainstLists",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "        self._wanted = {number: task for number, task in self._wanted.items() if not task.job.done}\n",
        "",
        "tests/workers/test_task_table.py::test_restart_mends_a_change_that_was_interrupted_at_any_line",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "        job.value, job.error = value, error\n        job.done = True\n        self._wanted.pop(task.number, None)\n",
        "        self._wanted.pop(task.number, None)\n        job.value, job.error = value, error\n        job.done = True\n",
        "tests/workers/test_task_table.py::test_restart_mends_a_change_that_was_interrupted_at_any_line",
    ),
    Mutation(
        "_workers/processes/change.py",
        "self._torn = kind is not None",
        "self._torn = False",
        "tests/workers/test_change.py::test_the_next_change_finds_what_belongs_together_together",
    ),
    Mutation(
        "_workers/processes/change.py",
        "self._torn = kind is not None",
        "pass",
        "tests/workers/test_change.py::test_the_next_change_finds_what_belongs_together_together",
    ),
    Mutation(
        "_workers/processes/change.py",
        "        self._torn = True  # until",
        "        # until",
        "tests/workers/test_change.py::test_an_interrupt_before_the_with_statement_has_hold_counts",
    ),
    Mutation(
        "_workers/processes/change.py",
        "            self._torn = False  # not before: an interrupt in `mend` leaves it to be called again\n",
        "",
        "tests/workers/test_change.py::test_who_only_looks_settles_first_and_once",
    ),
    Mutation(
        "_workers/processes/change.py",
        "            mend()\n            self._torn = False",
        "            self._torn = False\n            mend()",
        "tests/workers/test_change.py::test_an_interrupted_mending_is_done_again",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "0 if death or self.interrupted else",
        "0 if death else",
        "tests/workers/test_process_pool.py::test_an_interrupt_is_not_lost_with_the_byte_of_an_older_one",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "        self._tasks.restart()\n",
        "",
        "tests/workers/test_process_pool.py::test_an_exception_in_the_middle_of_a_change_loses_nothing",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "        while self._receive(worker):",
        "        while False:",
        "tests/workers/test_process_pool.py::test_what_a_worker_had_answered_is_not_done_again",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "        self._tasks.requeue(worker.held)\n",
        "",
        "tests/workers/test_process_pool.py::test_a_worker_that_dies_in_a_task_is_replaced",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "and self._tasks.blame(blamed, row):",
        "and self._tasks.blame(blamed, row) and False:",
        "tests/workers/test_process_pool.py::test_a_row_that_kills_twice_is_named",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "            worker.skip_below(self._tasks.next_number)\n",
        "            pass\n",
        "tests/workers/test_process_pool.py::test_interrupt_ends_a_wait_and_discard_forgets",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "        self._supervisor.wake()\n",
        "",
        "tests/workers/test_process_pool.py::test_interrupt_ends_a_wait_and_discard_forgets",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "            worker.kill()  # its",
        "            # its",
        "tests/workers/test_process_pool.py::test_a_stuck_worker_is_killed_after_the_timeout",
    ),
    Mutation(
        "_workers/processes/worker_handle.py",
        "            self.slots.give_back(answer.slot)\n            return task, None, None",
        "            return task, None, None",
        "tests/workers/test_process_pool.py::test_discarded_results_hold_no_slot",
    ),
    Mutation(
        "_workers/processes/worker_handle.py",
        "            self.slots.give_back(lent, useful=answer.slot == NO_SLOT)",
        "            pass",
        "tests/workers/test_process_pool.py::test_slots_are_used_again",
    ),
    Mutation(
        "_workers/processes/worker_handle.py",
        "            self.slots.give_back(lent, useful=answer.slot == NO_SLOT)",
        "            self.slots.give_back(lent)",
        "tests/workers/test_process_pool.py::test_slots_that_are_too_small_are_replaced",
    ),
    Mutation(
        "_workers/processes/worker_handle.py",
        "        self._places.append(place)\n",
        "",
        "tests/workers/test_process_pool.py::test_results_are_those_of_their_tasks",
    ),
    Mutation(
        "_workers/processes/supervisor.py",
        "        handle.close()\n        handle.kill()\n",
        "        handle.kill()\n",
        "tests/workers/test_process_pool.py::test_nothing_is_left_behind_by_healing_often",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "in reversed([task for task in tasks if not task.job.done]):",
        "in [task for task in tasks if not task.job.done]:",
        "tests/workers/test_process_pool.py::test_unfinished_tasks_come_first_and_in_order",
    ),
    Mutation(
        "_workers/pool.py",
        " and not isinstance(self.error, StopIteration | StopAsyncIteration)",
        "",
        "tests/loader/test_loader.py::test_stop_iteration_out_of_user_code_is_an_error_not_an_end",
    ),
    Mutation(
        "_workers/reader_thread.py",
        "len(shelf.items) >= self.depth:",
        "len(shelf.items) > self.depth:",
        "tests/nodes/test_prefetcher.py::test_it_reads_ahead_but_no_further_than_its_depth",
    ),
    Mutation(
        "_workers/reader_thread.py",
        "            self._shelf.source.interrupt()\n        while core.inside:",
        "            self._shelf.source.interrupt()\n        while False:",
        "tests/nodes/test_prefetcher.py::test_a_reset_steals_no_item",
    ),
    Mutation(
        "_workers/thread_pool.py",
        "            weakref.finalize(self, _abandoned, self._core, os.getpid())\n",
        "",
        "tests/workers/test_thread_pool.py::test_an_abandoned_pool_ends_its_threads",
    ),
    Mutation(
        "_workers/thread_pool.py",
        "        del job, value, error  # This frame must not keep a batch alive while it waits for the next.\n",
        "",
        "tests/workers/test_thread_pool.py::test_a_waiting_thread_keeps_no_batch",
    ),
    Mutation(
        "_workers/lifetime.py",
        "thread.join(max(0.0, deadline - time.monotonic()))",
        "thread.join(max(timeout, _WAKING_S))",
        "tests/workers/test_thread_pool.py::test_many_stuck_threads_take_no_longer_than_one",
    ),
    # Tasks with an owner.
    Mutation(
        "_workers/processes/task_table.py",
        "(self._backlog if owner is None else self._queue(owner)).append(task)",
        "self._backlog.append(task)",
        "tests/workers/test_task_table.py::test_a_task_waits_for_its_owner",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "else self._queue(owner)\n        return queue",
        "else self._queue(owner) or self._backlog\n        return queue",
        "tests/workers/test_task_table.py::test_a_task_waits_for_its_owner",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "self._queue(task.owner).appendleft(task)",
        "self._backlog.appendleft(task)",
        "tests/workers/test_task_table.py::test_what_a_dead_owner_held_waits_for_its_replacement",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "self._queue(task.owner).appendleft(task)",
        "self._backlog.appendleft(task)",
        "tests/workers/test_process_pool.py::test_the_replacement_of_an_owner_does_its_tasks",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "            self._queue(task.owner).append(task)",
        "            self._backlog.append(task)",
        "tests/workers/test_task_table.py::TestAgainstLists",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "        self.owned.clear()\n",
        "",
        "tests/workers/test_task_table.py::TestAgainstLists",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "            self._tasks.add(job, body, to)",
        "            self._tasks.add(job, body)",
        "tests/workers/test_process_pool.py::test_a_task_goes_to_its_owner",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "            while len(worker.held) < most and (task",
        "            while (task",
        "tests/workers/test_process_pool.py::test_an_owner_that_is_behind_holds_up_its_own_tasks_only",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "        if not any(len(worker.held) <= refill_at for worker in able):\n            return\n",
        "        able = [worker for worker in able if len(worker.held) <= refill_at]\n",
        "tests/workers/test_process_pool.py::test_a_worker_that_is_refilled_gets_no_run_of_tasks",
    ),
    Mutation(
        "integrations/transformers.py",
        "if issubclass(one, Trainer) and",
        "if False and",
        "tests/trainers/test_transformers.py::test_a_mixin_behind_the_trainer_is_refused",
    ),
    Mutation(
        "integrations/transformers.py",
        "(left := loader.remaining)",
        "(left := 0)",
        "tests/trainers/test_transformers.py::test_the_mixin_steps_for_the_last_window_of_a_resumed_epoch[4]",
    ),
    Mutation(
        "_loader/dataloader_words.py",
        'f_globals.get("__name__") == _REBUILDS',
        "f_globals is None",
        "tests/trainers/test_accelerate.py::test_accelerate_never_rebuilds_a_loader[configuration0-2]",
    ),
    # Lanes and their owners.
    Mutation(
        "_nodes/lane_owners.py",
        "len(self._places))",
        "index % self._lanes)",
        "tests/nodes/test_lane_owners.py::test_contiguous_pieces_in_the_order_of_appearance",
    ),
    Mutation(
        "_nodes/lane_owners.py",
        "lanes // math.gcd(lanes, world_size)",
        "lanes",
        "tests/nodes/test_lane_owners.py::test_contiguous_pieces_in_the_order_of_appearance",
    ),
    Mutation(
        "_nodes/lane_owners.py",
        "lanes // math.gcd(lanes, world_size)",
        "lanes",
        "tests/nodes/test_lanes_and_workers.py::test_each_rank_divides_its_own_lanes",
    ),
    Mutation(
        "_nodes/lane_owners.py",
        "max(1, self._share // (self._workers * max(1, len(values))))",
        "1",
        "tests/nodes/test_lane_owners.py::test_the_work_is_even_and_a_window_of_two_batches_a_worker_keeps_all_busy",
    ),
    Mutation(
        "_nodes/lane_owners.py",
        "            if not isinstance(index, int):\n                return {}\n",
        "",
        "tests/nodes/test_lane_owners.py::test_what_is_no_index_has_no_owner",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "self._split(work, item, [work.part(item, own) for own in rows.values()], [*rows])",
        "self._split(work, item, [work.part(item, own) for own in rows.values()], [None] * len(rows))",
        "tests/nodes/test_lanes_and_workers.py::test_each_lane_is_read_by_one_worker_forward",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "pool.submit(item, next(iter(rows), None))",
        "pool.submit(item)",
        "tests/nodes/test_lanes_and_workers.py::test_single_samples_go_to_the_owners_too",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "(len(rows) > 1 or (rows and work.collates_itself))",
        "len(rows) > 1",
        "tests/nodes/test_lanes_and_workers.py::test_a_collate_fn_runs_here_and_draws_as_anywhere",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "self._inline if work.collates_itself else work.inline",
        "work.inline",
        "tests/nodes/test_lanes_and_workers.py::test_a_collate_fn_that_draws_nothing_is_soon_run_ahead",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "(not self.num_workers or (self._lanes is not None and self._inline.seeded.collates_itself)) and",
        "not self.num_workers and",
        "tests/nodes/test_lanes_and_workers.py::test_also_in_a_reader_thread_while_the_consumer_draws",
    ),
    # Draws in worker threads.
    Mutation(
        "_random/draws.py",
        "if not self._alone and not self.over:",
        "if False:",
        "tests/nodes/test_draw_watch.py::test_another_thread_may_draw",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "self._draws.trying or not self._measured.tasks",
        "not self._measured.tasks",
        "tests/nodes/test_draw_watch.py::test_a_loop_that_is_slower_than_its_workers_is_told_too[1]",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "self._pool = ThreadPool(",
        "self._owners = LaneOwners(8, 1, 2)\n                self._pool = ThreadPool(",
        "tests/nodes/test_lanes_and_workers.py::test_threads_share_what_they_read_so_nothing_changes",
    ),
    Mutation(
        "_fetch/fetch.py",
        "isinstance(lanes, int) and not isinstance(lanes, bool) and lanes > 0",
        "lanes",
        "tests/nodes/test_lanes_and_workers.py::test_what_is_no_number_of_lanes_is_ignored",
    ),
    Mutation(
        "_fetch/task.py",
        "        samples.sort(key=_row)\n",
        "",
        "tests/nodes/test_lanes_and_workers.py::test_each_lane_is_read_by_one_worker_forward",
    ),
    Mutation(
        "_fetch/task.py",
        "task.positions[rows], task.values[rows]",
        "task.positions[: len(rows)], task.values[rows]",
        "tests/nodes/test_lanes_and_workers.py::test_every_batch_is_what_one_process_would_have_made",
    ),
    Mutation(
        "_fetch/task.py",
        "failure._replace(row=part.rows[failure.row])",
        "failure",
        "tests/nodes/test_lanes_and_workers.py::test_skipping",
    ),
    Mutation(
        "_fetch/task.py",
        "        failures.sort(key=_row)\n",
        "",
        "tests/nodes/test_lanes_and_workers.py::test_skipping",
    ),
    Mutation(
        "_fetch/task.py",
        "if failure.skipped}",
        "}",
        "tests/nodes/test_lanes_and_workers.py::test_substitutes",
    ),
    Mutation(
        "_fetch/task.py",
        "kept=inline and fetch.collate_fn is not None",
        "kept=False",
        "tests/nodes/test_lanes_and_workers.py::test_a_collate_fn_runs_here_and_draws_as_anywhere",
    ),
    Mutation(
        "_fetch/task.py",
        "    if type(samples) not in (list, tuple):",
        "    if False:",
        "tests/nodes/test_lanes_and_workers.py::test_getitems_that_returns_a_batch_is_refused",
    ),
    Mutation(
        "_workers/pool.py",
        "or any(isinstance(job.error, TimeoutError) for",
        "or any(job.error is not None for",
        "tests/nodes/test_lanes_and_workers.py::test_a_split_batch_is_done_when_all_of_it_is",
    ),
    Mutation(
        "_workers/pool.py",
        " or any(isinstance(job.error, TimeoutError) for job in self._jobs)",
        "",
        "tests/nodes/test_lanes_and_workers.py::test_a_split_batch_is_done_when_all_of_it_is",
    ),
    Mutation(
        "_workers/processes/task_table.py",
        "self._queue(task.owner).appendleft(task)",
        "self._backlog.appendleft(task)",
        "tests/nodes/test_lanes_and_workers.py::test_a_worker_that_dies_in_the_middle_of_a_part",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        'map_fn.lanes if method == "process" and',
        'None if method == "process" and',
        "tests/streams/test_lane_workers.py::test_each_shard_is_opened_once_in_a_pass",
    ),
    Mutation(
        "_fetch/task.py",
        "samples += zip(kept, partial.value or (), strict=True)",
        "samples += zip(sorted(kept, reverse=True), partial.value or (), strict=True)",
        "tests/streams/test_lane_workers.py::test_a_worker_that_dies_in_the_middle_of_a_shard",
    ),
    # One task.
    Mutation(
        "_fetch/task.py",
        "failure._replace(row=part.rows[failure.row])",
        "failure",
        "tests/nodes/test_split_first_batch.py::test_the_rows_of_faults",
    ),
    Mutation(
        "_fetch/task.py",
        "                cell[0] = row\n",
        "",
        "tests/fetch/test_fetch.py::test_the_cell_holds_the_row_that_is_being_loaded",
    ),
    Mutation(
        "_fetch/error_policy.py",
        "self._recent[0] <= ",
        "self._recent[0] < ",
        "tests/fetch/test_error_policy.py::test_the_budget_is_that_of_its_definition",
    ),
    Mutation(
        "_fetch/array_dataset.py",
        "torch.from_numpy(_from_0(indices, n))",
        "torch.from_numpy(indices)",
        "tests/fetch/test_array_dataset.py::test_indices_are_checked_before_they_go_to_a_device",
    ),
    # Nodes: the resume law, one state, transparent states.
    Mutation(
        "_nodes/cycler.py",
        'self._ended = initial_state["source"] is None',
        "self._ended = False",
        "tests/loader/test_state_dict.py::test_behind_the_last_batch",
    ),
    Mutation(
        "_nodes/cycler.py",
        "self._ended, self._begins = False, True",
        "self._ended = False",
        "tests/laws/test_resume.py::test_cycler_resumes_everywhere",
    ),
    Mutation(
        "_nodes/iterable_source.py",
        'if after is not None and after["epoch"] < epoch:',
        "if False:",
        "tests/nodes/test_streams_with_state.py::test_a_users_epoch_is_its_own",
    ),
    Mutation(
        "_nodes/iterable_source.py",
        "if counts(pristine) > self._reader.plain:",
        "if counts(pristine) > 1:",
        "tests/nodes/test_streams_with_state.py::test_a_users_epoch_is_its_own",
    ),
    Mutation(
        "_nodes/sharder.py",
        "missing = total + rank - left % world_size",
        "missing = left + rank - left % world_size",
        "tests/nodes/test_sharder.py::test_the_union_over_ranks_is_the_dataset_with_the_documented_tail",
    ),
    Mutation(
        "_nodes/sharder.py",
        "            self.source.take(1, every=rest, first=rest)",
        "            pass",
        "tests/nodes/test_sharder.py::test_the_union_over_ranks_is_the_dataset_with_the_documented_tail",
    ),
    Mutation(
        "_nodes/sharder.py",
        "if rest and share(rest, rank, world_size, self.tail) == 0:",
        "if rest and rest <= rank:",
        "tests/laws/test_resume.py::test_all_ranks_have_the_same_state_at_every_step",
    ),
    Mutation(
        "_nodes/sharder.py",
        "self.source.take(min(n, share(left, 0, world_size, self.tail)), every=world_size, first=rank)",
        "self.source.take(min(n, share(left, 0, world_size, self.tail)) * world_size)[rank::world_size]",
        "tests/nodes/test_sharder.py::test_one_rank_of_many_costs_its_own_share_only",
    ),
    Mutation(
        "_loader/loader.py",
        "            self._sharder.check_group()",
        "            pass",
        "tests/nodes/test_sharder.py::test_a_group_that_is_made_again_with_other_numbers",
    ),
    Mutation(
        "_nodes/distributed_sampler.py",
        "if share in ((0, 1), process_group()) else",
        "if share == process_group() else",
        "tests/loader/test_canonical_graph.py::test_a_distributed_sampler_of_one_rank_is_dealt",
    ),
    Mutation(
        "_nodes/tails.py",
        "rank < left else 0",
        "rank <= left else 0",
        "tests/nodes/test_tails.py::test_share_is_what_dealing_by_hand_gives",
    ),
    Mutation(
        "_nodes/batcher.py",
        "            self.source.take(left)",
        "            pass",
        "tests/nodes/test_batcher.py::test_what_drop_last_leaves_over_is_passed_with_the_last_batch",
    ),
    Mutation(
        "_nodes/sampler.py",
        'state = {"epoch": self._epoch, "position": self._position}',
        'state = vars(self).setdefault("live", {})\n        state.update(epoch=self._epoch, position=self._position)',
        "tests/laws/test_resume.py::test_nodes_above_the_cycler_resume_everywhere",
    ),
    Mutation(
        "_nodes/sampler.py",
        'state = {"epoch": self._epoch, "position": self._position}',
        'state = {"epoch": self._epoch, "position": self._position, "plan": self.at(np.arange(min(self._n, BLOCK))).plain()}',
        "tests/loader/test_loader.py::test_state_is_small_and_json_at_any_size",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        "                return found or [entry]\n",
        "                found.append(entry)\n                continue\n",
        "tests/nodes/test_parallel_mapper.py::test_out_of_order_delivers_what_is_done_and_no_epoch_early",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "if self._stale and self._pool is not None:",
        "if self._pool is not None:",
        "tests/laws/test_life.py::test_the_same_workers_across_epochs_jumps_and_loads",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        '            return cast("State", window.base)\n',
        '            return {"epoch": window.base["epoch"], "mapped": window.base}\n',
        "tests/laws/test_resume.py::test_adding_and_removing_transparent_nodes_keeps_the_state",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "while window.under_way < most and window.has_room(most, self._run_ahead)",
        "while window.under_way <= most and window.has_room(most + 1, self._run_ahead)",
        "tests/nodes/test_parallel_mapper.py::test_the_window_bounds_what_is_in_work",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        "self._skip = frozenset(delivered)",
        "self._skip = frozenset(list(delivered)[:1])",
        "tests/nodes/test_parallel_mapper.py::test_a_state_out_of_order_resumes_to_exactly_the_others",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        "while entries and entries[0].delivered:",
        "while entries and (entries[0].delivered or len(entries) > 1):",
        "tests/nodes/test_delivery_window.py::TestAgainstTwoLists",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        "place - oldest for",
        "place - self._pulled for",
        "tests/nodes/test_delivery_window.py::test_what_was_delivered_before_the_state_was_saved_is_counted_from_the_oldest",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        "            entry.job.forget()\n",
        "            self.settle()\n",
        "tests/nodes/test_delivery_window.py::TestAgainstTwoLists",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        "self._exhausted or self.under_way",
        "self.under_way",
        "tests/nodes/test_delivery_window.py::test_what_may_be_pulled",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        " or len(self._entries) >= 4 * most + 4",
        "",
        "tests/nodes/test_delivery_window.py::test_out_of_order_four_times_as_many_may_wait_for_the_oldest",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        "            return False  # whether",
        "            return True  # whether",
        "tests/nodes/test_delivery_window.py::test_what_may_be_pulled",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        "return run_ahead and not empty_epoch",
        "return run_ahead",
        "tests/nodes/test_delivery_window.py::test_what_may_be_pulled",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        "        if self._entries[0].delivered:\n            self.settle()",
        "        if False:\n            self.settle()",
        "tests/nodes/test_delivery_window.py::TestAgainstTwoLists",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        "self.comes_delivered = self._pulled in self._skip",
        "self.comes_delivered = False",
        "tests/nodes/test_delivery_window.py::TestAgainstTwoLists",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        "if self._skip or not self.in_order:",
        "if not self.in_order:",
        "tests/nodes/test_delivery_window.py::TestAgainstTwoLists",
    ),
    Mutation(
        "_workers/lifetime.py",
        "max(0.0, deadline - time.monotonic())\n\n\n_logger",
        "2.0\n\n\n_logger",
        "tests/workers/test_lifetime.py::test_all_that_ends_in_one_body_shares_its_time",
    ),
    Mutation(
        "_nodes/plan_source.py",
        "            if self._ordered is not None and not self._ordered[1].done:\n",
        "            if True:\n",
        "tests/nodes/test_plan_source.py::test_a_plan_that_is_ready_outlives_an_interrupt",
    ),
    Mutation(
        "_nodes/cycler.py",
        "        while isinstance(inner, dict):",
        "        if isinstance(inner, dict):",
        "tests/nodes/test_cycler.py::test_a_state_whose_source_is_in_another_epoch_is_refused_at_any_depth",
    ),
    Mutation(
        "_loader/canonical_graph.py",
        "        return Fetch(Items(), collate_fn, transform)\n",
        "        return lambda items: Fetch(None, collate_fn).collate([transform(item) for item in items])\n",
        "tests/fetch/test_transform.py::test_each_sample_is_transformed_with_its_own_numbers",
    ),
    Mutation(
        "_fetch/task.py",
        "lambda _: transform(next(samples))",
        "list(map(transform, samples)).__getitem__",
        "tests/fetch/test_transform.py::test_an_error_names_the_sample_and_may_skip_it",
    ),
    Mutation(
        "_fetch/task.py",
        "Fetch(fetch.dataset, _samples, fetch.transform)",
        "Fetch(fetch.dataset, _samples)",
        "tests/fetch/test_transform.py::test_each_sample_is_transformed_with_its_own_numbers",
    ),
    Mutation(
        "_fetch/fetch.py",
        "collate_fn is None and transform is None and is_arrays(dataset)",
        "collate_fn is None and is_arrays(dataset)",
        "tests/fetch/test_transform.py::test_arrays_are_transformed_sample_by_sample",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "self._window.restart(self._window.base, self._window.ahead)",
        "self._window.restart(self._window.base)",
        "tests/nodes/test_parallel_mapper.py::test_holes_are_in_the_state_after_the_end",
    ),
    Mutation(
        "_nodes/delivery_window.py",
        "        error = self.value\n",
        "        error, self.value = self.value, None\n",
        "tests/nodes/test_parallel_mapper.py::test_ctrl_c_while_an_error_of_the_source_is_raised_loses_neither",
    ),
    Mutation(
        "_workers/pool.py",
        "if not job.done] or self._jobs",
        "if not job.done]",
        "tests/nodes/test_split_first_batch.py::test_a_batch_whose_last_part_has_just_been_done_can_be_waited_for",
    ),
    Mutation(
        "_nodes/cycler.py",
        "        if self._ended and not len(positions):",
        "        if False:",
        "tests/nodes/test_cycler.py::test_at_the_end_of_an_epoch_nothing_is_asked_of_the_source",
    ),
    Mutation(
        "_nodes/plan_source.py",
        "        if self._closed:\n            self._pool.shutdown()",
        "        if False:\n            self._pool.shutdown()",
        "tests/nodes/test_plan_source.py::test_nothing_is_started_behind_the_end",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "        if self.closed:  # meanwhile",
        "        if False:  # meanwhile",
        "tests/workers/test_process_pool.py::test_processes_that_were_started_too_late_are_ended",
    ),
    Mutation(
        "_loader/loader.py",
        "            self._cursor.lost()  # until the reset is done",
        "            pass  # until the reset is done",
        "tests/loader/test_interrupts.py::test_an_interrupt_in_the_middle_of_a_refresh_loses_nothing",
    ),
    Mutation(
        "_loader/loader.py",
        "            if self._closed:  # by a signal handler",
        "            if False:  # by a signal handler",
        "tests/loader/test_interrupts.py::test_user_code_that_closes_the_loader_gets_no_batch",
    ),
    Mutation(
        "_workers/processes/remote_error.py",
        "        _drop_context(error, inherited)\n",
        "",
        "tests/workers/test_process_pool.py::test_what_the_consumer_was_handling_at_the_fork_is_no_context_of_errors",
    ),
    # The roof.
    Mutation(
        "_loader/cursor.py",
        "            return PassMark(epoch)\n",
        "            return Jump(self.epochs.start_of(epoch + 1))\n",
        "tests/loader/test_loader.py::test_set_epoch_in_a_loop_drops_nothing",
    ),
    Mutation(
        "_loader/cursor.py",
        "if requested == epoch:\n            return Jump(self.state, over_mark=self._endless)",
        "if requested == epoch:\n            return Jump(self.epochs.start_of(epoch), over_mark=self._endless)",
        "tests/loader/test_loader.py::test_set_epoch_continues_a_loaded_epoch",
    ),
    Mutation(
        "_loader/loader.py",
        "                self._commits.delivered(state)\n",
        "",
        "tests/loader/test_loader.py::test_commit_means_the_last_committed_batch",
    ),
    Mutation(
        "_loader/loader.py",
        "if changed and strict:",
        "if False:",
        "tests/loader/test_loader.py::test_other_settings_are_a_mismatch_with_both_values",
    ),
    # Datasets.
    Mutation(
        "_datasets/cache_files.py",
        "if not self._checked[place] and not is_record(memory, end, place):",
        "if False:",
        "tests/datasets/test_cached.py::test_whatever_the_index_says_no_sample_is_wrong",
    ),
    Mutation(
        "_datasets/cache_files.py",
        "    if _HAS_LOCKS:\n        try:",
        "    if False:\n        try:",
        "tests/datasets/test_cached.py::test_no_sample_is_loaded_twice_however_many_ask",
    ),
    Mutation(
        "_datasets/resident.py",
        "field[done : done + rows] = values",
        "field[done : done + rows] = values.flip(0)",
        "tests/datasets/test_resident.py::test_batches_are_the_ordinary_loaders",
    ),
    # The tools that users test with.
    Mutation(
        "testing.py",
        "    assert crossed >= 2, ",
        "    assert crossed >= 1, ",
        "tests/laws/test_resume.py::test_the_law_wants_two_ends_of_an_epoch",
    ),
    Mutation(
        "testing.py",
        "                assert resumed.state() == states[step + 1], (",
        "                assert True, (",
        "tests/laws/test_resume.py::test_the_law_sees_a_planted_fault",
    ),
    # Samplers, and the plans of their epochs.
    Mutation(
        "_nodes/epoch_planner.py",
        "(self._reading.epoch, self._reading.begin) != request[:2]:",
        "self._reading.epoch != request.epoch:",
        "tests/nodes/test_epoch_planner.py::test_a_block_is_given_to_whoever_asks_for_a_position_in_it",
    ),
    Mutation(
        "_nodes/epoch_planner.py",
        "plan.end <= position:",
        "plan.end < position:",
        "tests/nodes/test_epoch_planner.py::test_a_block_is_given_to_whoever_asks_for_a_position_in_it",
    ),
    Mutation(
        "_nodes/epoch_planner.py",
        "        except BaseException as exc:\n            self.close()\n",
        "        except BaseException as exc:\n",
        "tests/nodes/test_epoch_planner.py::test_an_epoch_that_failed_is_read_again_from_its_start",
    ),
    Mutation(
        "_nodes/epoch_planner.py",
        "                self._pristine = copied(self._sampler)\n",
        "                pass\n",
        "tests/nodes/test_epoch_planner.py::test_a_memory_is_led_to_any_epoch",
    ),
    Mutation(
        "_nodes/epoch_planner.py",
        "        self._next_epoch = None\n",
        "",
        "tests/nodes/test_epoch_planner.py::test_a_memory_is_led_to_any_epoch",
    ),
    Mutation(
        "_nodes/epoch_planner.py",
        "fits = fits or plan.fits(request.position, request.checksum)",
        "fits = True",
        "tests/nodes/test_epoch_planner.py::test_a_memory_that_shows_only_at_the_end_of_an_epoch_is_found[False-9-2]",
    ),
    Mutation(
        "_nodes/epoch_planner.py",
        " and self._tried(trial, request) == (True, plan)",
        "",
        "tests/nodes/test_epoch_planner.py::test_a_memory_is_found_in_a_sampler_that_is_told_its_epochs",
    ),
    Mutation(
        "_nodes/epoch_planner.py",
        "                if not plan.more:\n                    break\n",
        "                if fits or not plan.more:\n                    break\n",
        "tests/nodes/test_epoch_planner.py::test_a_memory_that_shows_only_at_the_end_of_an_epoch_is_found[False-1-1]",
    ),
    Mutation(
        "_nodes/epoch_planner.py",
        "(request.checksum or is_told",
        "(request.position or is_told",
        "tests/nodes/test_epoch_planner.py::test_a_memory_that_shows_only_at_the_end_of_an_epoch_is_found[True-1-2]",
    ),
    Mutation(
        "_nodes/length_book.py",
        "            self._believed = False\n",
        "",
        "tests/nodes/test_epoch_planner.py::test_a_length_is_believed_until_an_epoch_shows_otherwise",
    ),
    Mutation(
        "_nodes/length_book.py",
        "return None if plan.is_block else len(plan)",
        "return len(plan)",
        "tests/nodes/test_epoch_planner.py::test_a_block_is_no_length",
    ),
    Mutation(
        "_nodes/sampler_wrapper.py",
        " or (self._plan is not None and not self._plan.fits(self._position, self._checksum))",
        "",
        "tests/nodes/test_epoch_planner.py::test_a_state_of_another_run_is_refused_although_the_plan_is_in_hand",
    ),
    Mutation(
        "_nodes/sampler_wrapper.py",
        "        self._ready = request, plan\n",
        "",
        "tests/loader/test_check_ranks.py::test_looking_shows_what_comes_and_changes_nothing[cannot be pickled-inline]",
    ),
    Mutation(
        "_nodes/reader_node.py",
        "                pump.pause()\n",
        "                pass\n",
        "tests/loader/test_check_ranks.py::test_nobody_reads_the_sampler_at_the_same_time",
    ),
    Mutation(
        "_nodes/sampler_wrapper.py",
        "        if not plan.fits(position, checksum):\n",
        "        if False:\n",
        "tests/nodes/test_sampler_wrapper.py::TestSamplerWrapperResumes::test_never_into_another_plan",
    ),
    Mutation(
        "_nodes/sampler_wrapper.py",
        "        self._position, self._checksum = position, checksum\n        return parts",
        "        self._position = position\n        return parts",
        "tests/nodes/test_sampler_wrapper.py::TestSamplerWrapperResumes::test_nothing_is_replayed_for_a_sampler_without_a_memory",
    ),
    Mutation(
        "_nodes/sampler_wrapper.py",
        "        self._plans.order(plan.next_request(self._epoch))\n",
        "",
        "tests/nodes/test_sampler_wrapper.py::TestSamplerWrapperPlansAhead::test_so_that_a_slow_sampler_makes_no_gap",
    ),
    Mutation(
        "_nodes/plan_source.py",
        "(self._ordered is None or self._ordered[0] != request)",
        "self._ordered is None",
        "tests/nodes/test_plan_source.py::test_a_jump_is_answered_behind_what_is_under_way",
    ),
    Mutation(
        "_nodes/plan_source.py",
        "(self._ordered is None or self._ordered[0] != request)",
        "True",
        "tests/nodes/test_plan_source.py::test_what_is_ordered_is_made_meanwhile_and_once",
    ),
    Mutation(
        "_nodes/plan_source.py",
        "            if self._ordered is not None and not self._ordered[1].done:\n",
        "            if False:\n",
        "tests/nodes/test_plan_source.py::test_an_interrupt_gets_a_waiting_get_out_until_it_is_resumed",
    ),
    Mutation(
        "_nodes/plan_source.py",
        "        if self._interrupted:\n            raise ClosedError",
        "        if False:\n            raise ClosedError",
        "tests/nodes/test_plan_source.py::test_an_interrupt_before_the_first_plan_is_not_lost",
    ),
    Mutation(
        "_nodes/plan_source.py",
        '            if self._place == "here":\n                return None\n',
        '            if self._place == "here":\n                self._place = "thread"\n',
        "tests/nodes/test_plan_source.py::test_a_planner_may_move_after_a_plan_that_was_made_here",
    ),
    Mutation(
        "_nodes/plan_source.py",
        "max_restarts=0, ",
        "",
        "tests/nodes/test_plan_source.py::test_a_process_that_dies_names_the_epoch_and_the_remedy",
    ),
    Mutation(
        "_nodes/sampler_reading.py",
        "put_globals(self._globals)",
        "seed_globals(*self._key)",
        "tests/nodes/test_epoch_planner.py::test_a_block_draws_on_where_the_one_before_stopped",
    ),
    # Orders that data brings: mixes, windows, shards.
    Mutation(
        "_random/mix_stages.py",
        "[after - at for at, after in pairwise(items * end // self._whole for end in self._ends)]",
        "[block * (after - at) for at, after in pairwise(self.block * end // self._whole for end in self._ends)]",
        "tests/random/test_mix_order.py::TestShares::test_are_exact_at_a_trillion_items",
    ),
    Mutation(
        "_random/mix_stages.py",
        "items * end // self._whole for end",
        "int(items * (end / self._whole)) for end",
        "tests/random/test_mix_order.py::TestShares::test_are_exact_at_a_trillion_items",
    ),
    Mutation(
        "_random/mix_stages.py",
        "Fraction(Decimal(str(weight)))",
        "Fraction(float(weight))",
        "tests/random/test_mix_order.py::TestShares::test_mean_what_is_written",
    ),
    Mutation(
        "_random/mix_layout.py",
        "    placed = _unaligned(placed, splitmix64_stream(counter, keys[4], keys[5]))\n",
        "",
        "tests/random/test_mix_order.py::TestRanks::test_would_not_without_the_runs_of_64",
    ),
    Mutation(
        "_random/mix_order.py",
        "base = self.run * (self._counts[number][source] + counts[source])",
        "base = self.run * counts[source]",
        "tests/random/test_mix_order.py::TestStages::test_begin_where_they_say",
    ),
    Mutation(
        "_random/mix_order.py",
        "base = self.run * (self._counts[number][source] + counts[source])",
        "base = self.run * self._counts[number][source]",
        "tests/random/test_mix_order.py::TestSources::test_come_in_order_and_go_on_over_epochs",
    ),
    Mutation(
        "_random/mix_order.py",
        "self._keys = [philox_words(self._seed, number, MIXED, 6)",
        "self._keys = [philox_words(self._seed, len(self.stages), MIXED, 6)",
        "tests/random/test_mix_order.py::TestStages::test_appended_change_nothing_before_them",
    ),
    Mutation(
        "_random/mix_layout.py",
        'np.argsort(placed, axis=1, kind="stable")',
        'np.argsort(placed, axis=1, kind="stable")[:, ::-1]',
        "tests/random/test_mix_order.py::TestSources::test_come_in_order_and_go_on_over_epochs",
    ),
    Mutation(
        "_random/mix_order.py",
        "if len(those) == 1 and kept is not None and kept[:2] == (number, those[0]):",
        "if len(those) == 1 and kept is not None and kept[0] == number:",
        "tests/random/test_mix_order.py::test_reads_the_same_in_blocks_of_any_size_and_stride",
    ),
    Mutation(
        "_random/mix_order.py",
        "run = -(-(epoch * self._n + position) // self.run)",
        "run = (epoch * self._n + position) // self.run",
        "tests/random/test_mix_order.py::TestStages::test_count_items_and_not_runs",
    ),
    Mutation(
        "_random/mix_order.py",
        "bisect_left(self.stages, run, key=lambda stage: stage.start))}",
        "len(self.stages))}",
        "tests/random/test_mix_order.py::TestStages::test_that_lie_ahead_are_not_in_the_settings",
    ),
    Mutation(
        "_random/mix_order.py",
        "place + (up and length % self.run > 0) for",
        "place for",
        "tests/random/test_mix_order.py::TestStop::test_holds_whole_runs",
    ),
    Mutation(
        "_random/mix_order.py",
        "(max(found) if up else min(found))",
        "(min(found) if up else max(found))",
        "tests/random/test_mix_order.py::TestStop::test_before_any_item_would_come_again_or_once_all_have_come",
    ),
    Mutation(
        "_random/mix_order.py",
        "order.indices((first + one) % 2**63, at[chosen]",
        "order.indices(one, at[chosen]",
        "tests/random/test_mix_order.py::TestSources::test_come_in_order_and_go_on_over_epochs",
    ),
    Mutation(
        "_random/mix_order.py",
        'f"{seed}/{name}".encode()',
        'f"{seed}".encode()',
        "tests/datasets/test_mix.py::TestWhatComes::test_sources_of_one_length_are_not_shuffled_alike",
    ),
    Mutation(
        "_datasets/mix.py",
        "self.names = sorted(datasets)",
        "self.names = list(datasets)",
        "tests/datasets/test_mix.py::TestWhatComes::test_does_not_depend_on_the_order_of_the_sources",
    ),
    Mutation(
        "_datasets/mix.py",
        "copy.deepcopy(weights)",
        "weights",
        "tests/datasets/test_mix.py::TestAsADataset::test_keeps_the_weights_that_it_was_given",
    ),
    Mutation(
        "_datasets/mix.py",
        "loading.leave_source(outer)",
        "pass",
        "tests/datasets/test_mix.py::TestWhoKnowsTheSource::test_the_sample",
    ),
    Mutation(
        "_datasets/mix.py",
        "for more in (0, 1)",
        "for more in (0,)",
        "tests/datasets/test_mix.py::TestReport::test_may_be_bounded",
    ),
    Mutation(
        "_fetch/sample.py",
        "            self._made.source = outer\n",
        "            pass\n",
        "tests/datasets/test_mix.py::TestWhoKnowsTheSource::test_the_sample",
    ),
    Mutation(
        "_loader/loader.py",
        "{**self._settings, **self._first.settings_at(*place)}",
        "self._settings",
        "tests/datasets/test_mix.py::TestState::test_goes_on_with_other_stages_from_where_it_was_taken",
    ),
    Mutation(
        "_loader/canonical_graph.py",
        "    if sampler is not None or batch_sampler is not None:\n        _check_replaceable",
        "    if False:\n        _check_replaceable",
        "tests/random/test_order_contract.py::TestADatasetThatBringsItsOrder::test_refuses_a_sampler",
    ),
    Mutation(
        "_random/order.py",
        "inspect.signature(method).bind(dataset, shuffle=shuffle, seed=seed)",
        "inspect.signature(method)",
        "tests/random/test_order_contract.py::test_an_order_that_is_something_else_is_the_users_own",
    ),
    Mutation(
        "_random/sliding_order.py",
        "min(self._n, begin + self._block + self._window)",
        "min(self._n, begin + self._block + self._window // 8)",
        "tests/random/test_sliding_order.py::test_is_a_permutation_within_its_window",
    ),
    Mutation(
        "_random/sliding_order.py",
        "low, high = max(0, begin - self._window)",
        "low, high = max(0, begin - self._window // 8)",
        "tests/random/test_sliding_order.py::test_is_a_permutation_within_its_window",
    ),
    Mutation(
        "_random/sliding_order.py",
        "        if keyed.epoch != epoch:\n            keyed = self._keyed = self._under(epoch)\n",
        "",
        "tests/random/test_sliding_order.py::test_epochs_and_seeds_differ",
    ),
    Mutation(
        "_random/shard_order.py",
        'np.searchsorted(laid.ends, place, side="right")',
        "np.searchsorted(laid.ends, place)",
        "tests/random/test_shard_order.py::test_every_record_comes_once",
    ),
    Mutation(
        "_random/shard_order.py",
        "+ np.minimum(lane, self._longer) + item",
        "+ item",
        "tests/random/test_shard_order.py::test_every_record_comes_once",
    ),
    Mutation(
        "_random/shard_order.py",
        "self._keys[2 * lane : 2 * lane + 2]",
        "self._keys[:2]",
        "tests/random/test_shard_order.py::test_a_window_moves_records_within_their_lane",
    ),
    Mutation(
        "testing.py",
        "            order.indices((epoch + 1) % epochs, positions)\n",
        "",
        "tests/random/test_order_contract.py::test_one_that_is_not_is_named",
    ),
    Mutation(
        "_random/groups.py",
        "found = bisect_left(rooms, (sizes[item], -1))",
        "found = bisect_left(rooms, (sizes[item] - 1, -1))",
        "tests/random/test_groups.py::TestPacks::test_hold_every_item_once_and_never_too_much",
    ),
    Mutation(
        "_random/groups.py",
        "        if found < len(rooms):\n",
        "        if False:\n",
        "tests/random/test_groups.py::TestPacks::test_leave_no_two_groups_that_would_go_into_one",
    ),
    Mutation(
        "_random/groups.py",
        '    return Groups(np.argsort(at, kind="stable")',
        '    return Groups(np.argsort(group_of, kind="stable")',
        "tests/random/test_groups.py::TestPacks::test_hold_every_item_once_and_never_too_much",
    ),
    Mutation(
        "_random/groups.py",
        "if len(ends) < needed <= len(ordered):",
        "if False:",
        "tests/random/test_groups.py::TestBuckets::test_hold_every_item_once_within_the_budget",
    ),
    Mutation(
        "_random/groups.py",
        "for k in range(needed - alike, -1, -alike) if len(ordered)",
        "for k in range(needed - alike, -1, -alike) if True or len(ordered)",
        "tests/random/test_groups.py::TestBuckets::test_are_whole_runs_if_there_are_items_enough",
    ),
    Mutation(
        "_random/groups.py",
        "runs[:, None] * alike + np.arange(alike)",
        "runs[:, None] + len(runs) * np.arange(alike)",
        "tests/random/test_groups.py::TestBuckets::test_pad_little_and_keep_ranks_busy_alike",
    ),
    Mutation(
        "_random/groups.py",
        "-(-lengths // capacity) if",
        "lengths // capacity if",
        "tests/random/test_groups.py::TestPieces::test_of_split_items_are_all_of_them",
    ),
    Mutation(
        "_nodes/sampler.py",
        'return {"all stages": self.order.settings()} if isinstance(self.order, StagedOrder) else {}',
        "return {}",
        "tests/datasets/test_mix.py::TestState::test_leaves_out_what_check_ranks_compares",
    ),
    Mutation(
        "_loader/loader.py",
        "_is_of_source(failure) and not isinstance(failure, ClosedError) and not self._cursor.is_told",
        "_is_of_source(failure) and not self._cursor.is_told",
        "tests/loader/test_interrupts.py::test_an_interrupted_jump_out_of_a_reading_source_is_made_again",
    ),
    Mutation(
        "_errors.py",
        "    return entry is None\n",
        "    return True\n",
        "tests/loader/test_interrupts.py::test_a_handler_that_exits_in_the_middle_of_a_sample_exits",
    ),
    # Token files, and rows that are written straight into a batch.
    Mutation(
        "_fetch/array_dataset.py",
        "at if isinstance(places, slice) else places[at]",
        "at",
        "tests/fetch/test_array_dataset.py::test_rows_are_written_where_they_belong",
    ),
    Mutation(
        "_fetch/array_dataset.py",
        "first if all(other == first for other in others) else None",
        "first",
        "tests/fetch/test_array_dataset.py::test_rows_that_differ_are_loaded_one_by_one",
    ),
    Mutation(
        "_fetch/array_dataset.py",
        "kind.__getitem__ is RowDataset.__getitem__ and ",
        "",
        "tests/fetch/test_array_dataset.py::test_rows_that_differ_are_loaded_one_by_one",
    ),
    Mutation(
        "_fetch/array_dataset.py",
        "rows if checked else _from_0(rows, len(dataset))",
        "rows",
        "tests/fetch/test_array_dataset.py::test_a_row_out_of_bounds_is_named",
    ),
    Mutation(
        "_streams/tokens.py",
        "offset = file.header + (start",
        "offset = (start",
        "tests/streams/test_tokens.py::test_each_sequence_is_its_slice_of_the_files",
    ),
    Mutation(
        "_streams/tokens.py",
        "number + (done == len(here))",
        "number + 1 if done else number + 2",
        "tests/streams/test_tokens.py::test_each_sequence_is_its_slice_of_the_files",
    ),
    Mutation(
        "_streams/tokens.py",
        "here = row[: file.first + file.tokens - start]",
        "here = row",
        "tests/streams/test_tokens.py::test_a_file_that_grows_while_it_is_open",
    ),
    Mutation(
        "_streams/tokens.py",
        "if not done and len(here):",
        "if False:",
        "tests/streams/test_tokens.py::test_a_file_that_becomes_shorter_while_it_is_open",
    ),
    Mutation(
        "_streams/tokens.py",
        "begins[:, 1:] = raw[:, :-1]",
        "begins[:, 1:] = raw[:, 1:]",
        "tests/streams/test_tokens.py::test_documents_that_end_with_a_token",
    ),
    Mutation(
        "_streams/tokens.py",
        "np.arange(1, len(borders) + 1) - first",
        "np.arange(1, len(borders) + 1)",
        "tests/streams/test_tokens.py::test_documents_that_end_with_a_token",
    ),
    Mutation(
        "_streams/tokens.py",
        "(starts, starts + span))",
        '(starts, starts + span), side="right")',
        "tests/streams/test_tokens.py::test_documents_by_their_starts",
    ),
    Mutation(
        "_streams/tokens.py",
        'return {**vars(self), "_open": {}}',
        "return vars(self)",
        "tests/streams/test_tokens.py::test_a_copy_is_small_and_opens_its_own_files",
    ),
    Mutation(
        "_streams/tokens.py",
        "while len(_opened) > MOST_OPEN:",
        "while False:",
        "tests/streams/test_tokens.py::test_few_files_are_open_at_a_time",
    ),
    Mutation(
        "_streams/tokens.py",
        "            descriptor = self._descriptor(number)  # held while it is read, because another thread may have it closed\n            done = os.preadv(descriptor.fd,",
        "            done = os.preadv(self._descriptor(number).fd,",
        "tests/streams/test_tokens.py::test_a_file_that_is_closed_while_it_is_read",
    ),
    Mutation(
        "_streams/tokens.py",
        "if nbytes != file.nbytes:",
        "if nbytes < file.nbytes:",
        "tests/streams/test_tokens.py::test_a_file_that_has_changed_since",
    ),
    Mutation(
        "_streams/tokens.py",
        "if rest or length not in (None, tokens):",
        "if rest:",
        "tests/streams/test_tokens.py::test_what_cannot_be_read_is_refused_when_it_is_built",
    ),
    # Packs and buckets.
    Mutation(
        "_nodes/grouper.py",
        "return np.arange(block * size, min((block + 1) * size, n))",
        "return np.arange(block * size, min((block + 1) * size, n - 1))",
        "tests/nodes/test_grouper.py::TestAnEpoch::test_of_packs_holds_every_place_of_every_item_once",
    ),
    Mutation(
        "_nodes/grouper.py",
        "begin = wanted + max(0, -(-(position - wanted) // every)) * every",
        "begin = position + first",
        "tests/nodes/test_grouper.py::TestTaking::test_some_of_the_items_passes_over_the_others",
    ),
    Mutation(
        "_nodes/grouper.py",
        "if planned is None or (planned.epoch, planned.block) != (self._epoch, block):",
        "if planned is None or planned.block != block:",
        "tests/nodes/test_grouper.py::TestAnEpoch::test_of_one_block_is_planned_anew",
    ),
    Mutation(
        "_nodes/grouper.py",
        "        self._reader.reset(self._reader.start_of(self._epoch))",
        "        self._reader.reset(self._reader.start_of(0))",
        "tests/nodes/test_grouper.py::TestAnEpoch::test_of_buckets_holds_every_sample_once_at_its_position_in_the_order",
    ),
    Mutation(
        "_nodes/grouper.py",
        "(initial_state[key] for key in _KEYS)",
        "(initial_state[key] * (key != 'taken') for key in _KEYS)",
        "tests/nodes/test_grouper.py::TestTheState::test_resumes_everywhere",
    ),
    Mutation(
        "_nodes/grouper.py",
        "(block + (taken > 0)) * self.groups.block",
        "block * self.groups.block",
        "tests/nodes/test_grouper.py::TestTheState::test_of_a_mix_depends_on_the_stages_that_the_block_has_seen",
    ),
    Mutation(
        "_nodes/grouper.py",
        "        self._reader.reset(self._reader.start_of(self._epoch))",
        "        self._reader.reset(self._reader.start_of(self._epoch))\n        [self._plan(block) for block in range(self._block + 1)]",
        "tests/nodes/test_grouper.py::TestTaking::test_after_a_jump_plans_one_block",
    ),
    Mutation(
        "_nodes/grouper.py",
        "            if taken and taken >= len(plan):",
        "            if False:",
        "tests/nodes/test_grouper.py::TestTheState::test_with_more_groups_than_the_block_has_is_refused_on_reading",
    ),
    Mutation(
        "_nodes/grouper.py",
        "        if counter is not None and counter.closed:",
        "        if False:",
        "tests/nodes/test_grouper.py::TestCounting::test_ahead_ends_with_the_node",
    ),
    Mutation(
        "_random/grouping.py",
        '        seed = int.from_bytes(hashlib.blake2b(indices.astype("<i8").tobytes(), digest_size=8).digest(), "little") >> 1',
        "        seed = 0",
        "tests/random/test_grouping.py::test_buckets_are_shuffled_by_their_indices",
    ),
    Mutation(
        "_random/grouping.py",
        "        if self.lengths.max(initial=0) > budget:",
        "        if self.lengths.max(initial=0) > 2 * budget:",
        "tests/random/test_grouping.py::test_buckets_refuse",
    ),
    Mutation(
        "_fetch/packing.py",
        "np.arange(self._at) - np.repeat(starts, self._lengths)",
        "np.arange(self._at)",
        "tests/fetch/test_packing.py::TestAPack::test_lays_sequences_and_pieces_one_after_another",
    ),
    Mutation(
        "_fetch/packing.py",
        "value[start : start + length]",
        "value[:length]",
        "tests/fetch/test_packing.py::TestALoaderOfPacks::test_gives_every_place_once",
    ),
    Mutation(
        "_fetch/packing.py",
        "    if len(value) != whole:",
        "    if len(value) < whole:",
        "tests/fetch/test_packing.py::TestWhatIsRefused::test_names_the_field_and_the_sequence",
    ),
    Mutation(
        "_fetch/packing.py",
        "                    loading.enter_member(pack.positions[member], index)",
        "                    pass",
        "tests/fetch/test_packing.py::TestALoaderOfPacks::test_gives_each_sequence_random_numbers_of_its_position_in_the_order",
    ),
    Mutation(
        "_fetch/sample.py",
        "            self.reseed(self.epoch, position)",
        "            pass",
        "tests/fetch/test_packing.py::TestALoaderOfPacks::test_seeds_the_global_generators_for_each_sequence",
    ),
    Mutation(
        "_fetch/fetch.py",
        "isinstance(dataset, Subset | View)",
        "isinstance(dataset, Subset)",
        "tests/datasets/test_packed.py::test_tells_the_dataset_its_epoch_but_only_one_that_has_it",
    ),
    Mutation(
        "_loader/canonical_graph.py",
        "PackView(dataset, groups.capacity, groups.pad, transform)",
        "PackView(dataset, groups.capacity, groups.pad)",
        "tests/fetch/test_packing.py::TestALoaderOfPacks::test_transforms_each_sequence_before_it_is_cut",
    ),
    Mutation(
        "_datasets/packed.py",
        " | (plan.pieces.starts // groups.capacity << _BITS)",
        "",
        "tests/datasets/test_packed.py::test_holds_every_place_once_whatever_loads_it",
    ),
    Mutation(
        "_datasets/packed.py",
        "            self._open(opened(self._path, self._identity))",
        "            pass",
        "tests/datasets/test_packed.py::TestTheFile::test_is_read_again_and_not_planned",
    ),
    Mutation(
        "_datasets/saved_array.py",
        "    if zlib.crc32(numbers.data) != crc:",
        "    if False:",
        "tests/datasets/test_packed.py::TestTheFile::test_damaged_is_refused",
    ),
    Mutation(
        "_streams/own_files.py",
        "            os.unlink(temporary)",
        "            pass",
        "tests/datasets/test_packed.py::TestTheFile::test_is_not_left_half_written",
    ),
    Mutation(
        "_datasets/keep.py",
        "        rank=0,\n        world_size=1,\n",
        "",
        "tests/datasets/test_keep.py::test_keeps_the_samples_for_which_the_predicate_holds_in_their_order",
    ),
    Mutation(
        "_datasets/keep.py",
        "        order=SequentialOrder(len(dataset)),\n",
        "",
        "tests/datasets/test_keep.py::test_keeps_the_samples_for_which_the_predicate_holds_in_their_order",
    ),
    Mutation(
        "_datasets/keep.py",
        '"settings": settings}',
        '"settings": None}',
        "tests/datasets/test_keep.py::TestTheFile::test_of_another_dataset_or_predicate_is_refused",
    ),
    Mutation(
        "_fetch/task.py",
        "many = inline or (task.is_batch",
        "many = (task.is_batch",
        "tests/random/test_global_seeding.py::test_in_the_thread_of_the_consumer_whatever_is_calm_is_left_alone",
    ),
    Mutation(
        "_fetch/task.py",
        "once = isinstance(fetch.dataset, Items)",
        "once = False",
        "tests/random/test_global_seeding.py::test_an_item_of_a_stream_is_transformed_once",
    ),
    Mutation(
        "_nodes/inline_work.py",
        "kept if self._of_items else task",
        "task",
        "tests/nodes/test_inline_work.py::test_a_function_gets_each_item_as_it_was",
    ),
    Mutation(
        "_nodes/inline_work.py",
        " or self.seeded.dataset is None",
        "",
        "tests/nodes/test_inline_work.py::test_a_transform_gets_each_item_as_it_was",
    ),
    Mutation(
        "__init__.py",
        "        with _importing:",
        "        if True:",
        "tests/project/test_front_door.py::test_one_thread_at_a_time_imports_rooms",
    ),
    Mutation(
        "__init__.py",
        "        _os.register_at_fork(after_in_child=_unlock_after_fork)",
        "        pass",
        "tests/project/test_front_door.py::test_a_fork_in_the_middle_of_an_import_leaves_nothing_locked",
    ),
    Mutation(
        "_loader/canonical_graph.py",
        "if seed_samples is True and collate_fn is None and transform is None:",
        "if False:",
        "tests/random/test_global_seeding.py::test_nothing_is_seeded_for_batches_in_which_nothing_of_the_user_runs",
    ),
    # Batches written in place.
    Mutation(
        "_fetch/batch_schema.py",
        "decisive = column[0] if field.kind is float else itertools.chain.from_iterable(column)",
        "decisive = column[0]",
        "tests/fetch/test_collate.py::test_a_number_of_many_that_becomes_another",
    ),
    Mutation(
        "_fetch/batch_schema.py",
        "written = self._table[: self._written].T.tolist()",
        "written = self._table[:0].T.tolist()",
        "tests/fetch/test_collate.py::test_a_number_of_many_that_becomes_another",
    ),
    Mutation(
        "_fetch/batch_schema.py",
        "            if {one.shape for one in column} != {self.shape}:\n                raise TypeError\n",
        "",
        "tests/fetch/test_collate.py::test_shapes_that_only_add_up",
    ),
    Mutation(
        "_fetch/batch_schema.py",
        "if column[begun].shape != self.shape:",
        "if column[0].shape != self.shape:",
        "tests/fetch/test_collate.py::test_another_shape_from_the_second_call_on",
    ),
    Mutation(
        "_fetch/batch_schema.py",
        "columns = torch.unsafe_split(memory, every)",
        "columns = memory.view(-1, every).unbind()",
        "tests/fetch/test_collate.py::test_numbers_may_be_changed_in_place_by_what_has_gradients",
    ),
    Mutation(
        "_fetch/batch_schema.py",
        "        if not self._in_order:",
        "        if False:",
        "tests/fetch/test_collate.py::test_a_field_of_any_kind",
    ),
    Mutation(
        "_fetch/batch_schema.py",
        "for begun in range(0, len(column), most):",
        "for begun in range(0, min(most, len(column)), most):",
        "tests/fetch/test_collate.py::test_large_rows",
    ),
    Mutation(
        "_fetch/padding.py",
        "-(-longest // self.to_multiple_of) * self.to_multiple_of",
        "(longest // self.to_multiple_of + 1) * self.to_multiple_of",
        "tests/fetch/test_padding.py::test_pads_to_the_longest_rounded_up",
    ),
    Mutation(
        "_fetch/padding.py",
        "            if isinstance(self.value, dict) and name not in self.value:",
        "            if False:",
        "tests/fetch/test_padding.py::test_a_dict_pads_the_fields_that_it_names",
    ),
    Mutation(
        "_streams/parquet.py",
        "[group.number], self._columns, use",
        "[group.number], None, use",
        "tests/streams/test_parquet.py::TestRows::test_have_only_the_columns_asked_for",
    ),
    Mutation(
        "_streams/parquet.py",
        "start = max(0, start - len(batch))",
        "start = max(0, start - 1)",
        "tests/streams/test_parquet.py::TestRows::test_of_row_groups_of_any_size",
    ),
    Mutation(
        "_streams/parquet.py",
        "range(start, len(batch), _AT_ONCE)",
        "range(0, len(batch), _AT_ONCE)",
        "tests/streams/test_parquet.py::TestRows::test_of_row_groups_of_any_size",
    ),
    Mutation(
        "_streams/parquet.py",
        ", pre_buffer=False, buffer_size=_BUFFER_BYTES",
        "",
        "tests/streams/test_parquet.py::TestResources::test_a_row_group_is_never_in_memory_whole",
    ),
    Mutation(
        "_streams/counted.py",
        "order.lanes > most_lanes",
        "False",
        "tests/streams/test_parquet.py::TestResources::test_the_default_lanes_fit_into_memory",
    ),
    Mutation(
        "_streams/parquet.py",
        "        group.check()\n        metadata",
        "        metadata",
        "tests/streams/test_parquet.py::TestWhatIsRefused::test_a_file_that_was_replaced",
    ),
    Mutation(
        "_streams/parquet.py",
        "    check_columns({",
        "    dict({",
        "tests/streams/test_parquet.py::TestWhatIsRefused::test_another_schema_in_one_file",
    ),
    Mutation(
        "_streams/tables.py",
        "for column in {**expected, **types}",
        "for column in expected",
        "tests/streams/test_parquet.py::TestWhatIsRefused::test_another_schema_in_one_file",
    ),
    Mutation(
        "_streams/parquet.py",
        "            file.close(force=True)\n\n\ndef",
        "            _KEPT.append(file)\n\n\n_KEPT = []\n\n\ndef",
        "tests/streams/test_parquet.py::TestResources::test_one_file_for_each_open_row_group_and_none_after_close",
    ),
    Mutation(
        "_streams/arrow.py",
        "batch.select(self._columns)",
        "batch",
        "tests/streams/test_arrow.py::TestRows::test_have_only_the_columns_asked_for",
    ),
    Mutation(
        "_streams/arrow.py",
        "self._ready.pop(number, None)",
        "self._ready.get(number)",
        "tests/streams/test_arrow.py::TestRows::test_may_be_changed_by_who_gets_them",
    ),
    Mutation(
        "_streams/arrow.py",
        "        piece.check()\n",
        "",
        "tests/streams/test_arrow.py::TestWhatIsRefused::test_a_file_that_was_replaced",
    ),
    Mutation(
        "_streams/arrow.py",
        "offsets.append(file.tell())",
        "offsets.append(offsets[-1])",
        "tests/streams/test_arrow.py::TestRows::test_are_those_of_pyarrow",
    ),
    Mutation(
        "_streams/arrow.py",
        "return rows, None",
        "pass",
        "tests/streams/test_arrow.py::TestRows::test_are_those_of_pyarrow",
    ),
    Mutation(
        "_streams/arrow.py",
        "    file = pyarrow.memory_map(path)\n",
        "    file = pyarrow.OSFile(path)\n",
        "tests/streams/test_arrow.py::TestResources::test_mapped_and_not_read",
    ),
    Mutation(
        "_streams/tables.py",
        'f"{name}.".startswith(f"{column}.") for name',
        "name.startswith(column) for name",
        "tests/streams/test_parquet.py::TestWhatIsRefused::test_a_missing_column",
    ),
    Mutation(
        "_streams/hugging_face.py",
        "worker._worker_info = worker._worker_info, None",
        "worker._worker_info = (worker._worker_info,) * 2",
        "tests/streams/test_hugging_face.py::TestStreams::test_exact_resume[fork]",
    ),
    Mutation(
        "_streams/hugging_face.py",
        "shard(self._dataset.num_shards, shard)",
        "shard(self._dataset.num_shards, self._dataset.num_shards - 1 - shard)",
        "tests/streams/test_hugging_face.py::TestStreams::test_the_samples_of_hugging_face",
    ),
    Mutation(
        "_streams/hugging_face.py",
        "stream.skip(start) if start else stream",
        "stream",
        "tests/streams/test_hugging_face.py::TestStreams::test_steps_that_keep_the_count",
    ),
    Mutation(
        "_streams/hugging_face.py",
        ' and not getattr(step, "batched", False)',
        "",
        "tests/streams/test_hugging_face.py::TestWhatIsRefused::test_steps_that_may_change_the_count",
    ),
    Mutation(
        "_streams/hugging_face.py",
        '    "SelectColumnsIterable",\n',
        '    "SelectColumnsIterable",\n    "FilteredExamplesIterable",\n',
        "tests/streams/test_hugging_face.py::TestWhatIsRefused::test_steps_that_may_change_the_count",
    ),
    Mutation(
        "_streams/hugging_face.py",
        "yield from _steps(before)",
        "yield before",
        "tests/streams/test_hugging_face.py::TestWhatIsRefused::test_a_shuffled_stream",
    ),
    # Data in shards.
    Mutation(
        "_streams/counted.py",
        'shards = np.searchsorted(self._ends, places, side="right")',
        'shards = np.searchsorted(self._ends, places, side="left")',
        "tests/streams/test_shards.py::TestWhatComes::test_in_order_is_the_concatenation",
    ),
    Mutation(
        "_streams/forward_reader.py",
        "while len(self._readers) >= self._most:",
        "while self._readers:",
        "tests/streams/test_shards.py::TestReadingForward::test_several_lanes_in_one_shard_have_a_reader_each",
    ),
    Mutation(
        "_streams/forward_reader.py",
        "reader.close()  # after an error nobody knows where it stands",
        "self._readers.append(reader)",
        "tests/streams/test_shards.py::TestErrors::test_an_error_is_gone_when_its_cause_is",
    ),
    Mutation(
        "_streams/forward_reader.py",
        "self.kept[self.next - 1] = record",
        "pass",
        "tests/streams/test_shards.py::TestReadingForward::test_what_was_passed_over_is_kept_until_asked_for",
    ),
    Mutation(
        "_streams/forward_reader.py",
        "if reader.next <= number and (",
        "if (",
        "tests/laws/test_shards.py::test_each_resumes_everywhere[forward-inline]",
    ),
    Mutation(
        "_streams/forward_reader.py",
        "for _ in self._iterator:",
        "for _ in ():",
        "tests/streams/test_shards.py::TestReadingForward::test_a_seek_that_is_ignored_is_seen",
    ),
    Mutation(
        "_streams/forward_reader.py",
        "number > self._dead_end:",
        "False:",
        "tests/streams/test_shards.py::TestErrors::test_what_lies_behind_damage_is_not_looked_for_again_and_again",
    ),
    Mutation(
        "_streams/jsonl.py",
        "record = Unreadable(exc)",
        "raise",
        "tests/streams/test_jsonl.py::test_a_line_that_is_not_json_may_be_skipped",
    ),
    Mutation(
        "_streams/open_shards.py",
        "if len(opened) != count:",
        "if False:",
        "tests/streams/test_shards.py::TestCounts::test_a_shard_that_can_be_indexed_is_measured",
    ),
    Mutation(
        "_streams/open_shards.py",
        "                    self._tidy()",
        "                    pass",
        "tests/streams/test_shards.py::TestOpenFiles::test_are_bounded_while_reading_and_gone_after_close",
    ),
    Mutation(
        "_streams/open_shards.py",
        "if self._pid != os.getpid():",
        "if False:",
        "tests/streams/test_shards.py::TestOpenFiles::test_are_not_used_after_a_fork[forward]",
    ),
    Mutation(
        "_streams/open_shards.py",
        "        self.lock = threading.Lock()\n        self.content",
        '        self.lock = globals().setdefault("_of_all", threading.Lock())\n        self.content',
        "tests/streams/test_shards.py::test_threads_wait_for_each_other_only_at_one_shard",
    ),
    Mutation(
        "_streams/files.py",
        "if then.fits(now):",
        "if True:",
        "tests/streams/test_jsonl.py::TestAnIndex::test_of_a_file_that_changed_is_refused",
    ),
    Mutation(
        "_streams/files.py",
        "if not self._frame.eof:",
        "if False:",
        "tests/streams/test_files.py::TestCompressed::test_an_end_in_the_middle_is_an_error[.zst]",
    ),
    Mutation(
        "_streams/own_files.py",
        'temporary = f"{path}.{secrets.token_hex(4)}.tmp"\n    try:\n        with open(temporary, "xb")',
        'temporary = path\n    try:\n        with open(temporary, "wb")',
        "tests/streams/test_indexing.py::TestTheFile::test_is_written_completely_or_not_at_all",
    ),
    Mutation(
        "_streams/index_file.py",
        "or zlib.crc32(data) != header.checksum",
        "",
        "tests/streams/test_jsonl.py::TestAnIndex::test_that_is_damaged_is_refused",
    ),
    Mutation(
        "_streams/files.py",
        "        check_unchanged(path, then, stamp(path), *IN_USE)\n",
        "",
        "tests/streams/test_indexing.py::TestTheCommand::test_a_file_that_changes_meanwhile_is_refused",
    ),
    Mutation(
        "_streams/tar.py",
        "(not header and not whole)",
        "not header",
        "tests/streams/test_tar.py::TestDamaged::test_a_tar_that_is_cut_short",
    ),
    Mutation(
        "_streams/tar.py",
        "named[1], named[2].lower()",
        "named[1], named[2]",
        "tests/streams/test_tar.py::TestAsWebdataset::test_reads",
    ),
    Mutation(
        "_streams/tar.py",
        "if (said - others + 1) % 65521 != zlib.adler32(header) & 0xFFFF:",
        "if False:",
        "tests/streams/test_tar.py::TestDamaged::test_a_header_that_is_damaged",
    ),
    Mutation(
        "_streams/tar.py",
        "if field[0] == 0x80:",
        "if False:",
        "tests/streams/test_tar.py::test_a_large_file_is_measured_in_binary",
    ),
    Mutation(
        "_streams/jsonl.py",
        "unfinished = data[int(ends[-1]) + 1 :]",
        'unfinished = b""',
        "tests/streams/test_jsonl.py::test_blank_lines_and_a_last_line_without_an_end_are_no_matter",
    ),
    Mutation(
        "_streams/jsonl.py",
        "if unfinished.strip():",
        "if False:",
        "tests/streams/test_jsonl.py::test_blank_lines_and_a_last_line_without_an_end_are_no_matter",
    ),
    Mutation(
        "_fetch/padding.py",
        "value % 1 == 0 and ",
        "",
        "tests/fetch/test_packing.py::TestWhatIsRefused::test_padding_that_does_not_fit",
    ),
    Mutation(
        "_nodes/grouper.py",
        "        return self.groups.count  # without counting",
        "        return self.remaining(self.start_of(0)) is not None",
        "tests/nodes/test_grouper.py::TestCounting::test_is_not_needed_to_say_that_there_is_a_number",
    ),
    Mutation(
        "_nodes/grouper.py",
        '"count": self.groups.count}',
        "}",
        "tests/nodes/test_grouper.py::TestCounting::test_must_be_asked_for_on_all_ranks",
    ),
    Mutation(
        "_nodes/grouper.py",
        "most = min(block * self.groups.block, len(self.order)) *",
        "most = len(self.order) *",
        "tests/nodes/test_grouper.py::TestTheState::test_out_of_bounds_is_refused",
    ),
    Mutation(
        "_datasets/resident.py",
        ", run_ahead=False, rank=0, world_size=1",
        ", run_ahead=False",
        "tests/datasets/test_resident.py::test_each_rank_holds_the_whole_dataset",
    ),
    Mutation(
        "_random/groups.py",
        "-(-lengths // capacity) if oversize",
        "np.maximum(1, -(-lengths // capacity)) if oversize",
        "tests/nodes/test_grouper.py::TestAnEpoch::test_of_empty_sequences_has_none_of_them",
    ),
    Mutation(
        "_random/groups.py",
        "(lengths > 0).astype(np.int64)",
        "np.ones_like(lengths)",
        "tests/random/test_groups.py::TestPieces::test_of_empty_items_are_none",
    ),
    Mutation(
        "_nodes/grouper.py",
        "if self.groups.count and (position > ",
        "if False and (position > ",
        "tests/nodes/test_grouper.py::TestTheState::test_that_counts_wrong_is_refused_before_the_epoch_ends",
    ),
    Mutation(
        "_nodes/grouper.py",
        "not 0 <= position - taken <= most",
        "not 0 <= position - taken",
        "tests/nodes/test_grouper.py::TestTheState::test_out_of_bounds_is_refused",
    ),
    Mutation(
        "_datasets/keep.py",
        '"predicate": holds, ',
        "",
        "tests/datasets/test_keep.py::TestTheFile::test_of_a_predicate_that_holds_other_values_is_refused",
    ),
    Mutation(
        "_datasets/keep.py",
        "        if not len(found):",
        "        if False:",
        "tests/datasets/test_keep.py::TestTheFile::test_is_not_written_if_nothing_is_kept",
    ),
    Mutation(
        "_fetch/padding.py",
        'dtype.kind in "iub"',
        'dtype.kind in "iu"',
        "tests/fetch/test_packing.py::TestWhatIsRefused::test_padding_that_does_not_fit",
    ),
    Mutation(
        "_fetch/padding.py",
        '                if f"{name}_lengths" in names:',
        "                if False:",
        "tests/fetch/test_padding.py::test_refuses",
    ),
    Mutation(
        "_streams/tokens.py",
        "    if given.byteorder == ",
        "    if False and given.byteorder == ",
        "tests/streams/test_tokens.py::test_what_cannot_be_read_is_refused_when_it_is_built",
    ),
    Mutation(
        "_fetch/array_dataset.py",
        "[operator.index(index)]",
        "[index]",
        "tests/fetch/test_array_dataset.py::test_a_row_is_asked_for_by_a_whole_number",
    ),
    Mutation(
        "_fetch/array_dataset.py",
        """annotate(exc, f"in the source {dataset.names[part]!r} of a mix")""",
        "pass",
        "tests/streams/test_tokens.py::test_an_error_of_a_batch_names_its_source_in_a_mix",
    ),
    # Bookmarks, and shards that fail for a while.
    Mutation(
        "_streams/facts.py",
        "for one in (*relied_on, *passes):",
        "for one in ():",
        "tests/streams/test_bookmarks.py::test_facts_say_what_all_that_was_added_agrees_on",
    ),
    Mutation(
        "_streams/facts.py",
        "for one in (*relied_on, *passes):",
        "for one in passes:",
        "tests/streams/test_bookmarks.py::test_a_fact_for_every_pass_contradicts_the_one_that_was_relied_on",
    ),
    Mutation(
        "_streams/facts.py",
        "            if relied_on:\n                self._relied_on.add(shard)\n",
        "",
        "tests/streams/test_bookmarks.py::test_who_relied_on_one_pass_relies_on_every_pass_once_that_is_known",
    ),
    Mutation(
        "_streams/facts.py",
        "if shard in self.doubted:",
        "if False:",
        "tests/streams/test_bookmarks.py::test_facts_say_what_all_that_was_added_agrees_on",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "if not comma or line != self._checked(said):",
        "if not comma:",
        "tests/streams/test_bookmarks.py::test_a_byte_that_was_overwritten_never_makes_another_fact",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "zlib.crc32(said, zlib.crc32(self._hash.encode()))",
        "zlib.crc32(said)",
        "tests/streams/test_bookmarks.py::test_a_file_in_the_folder_of_another_binding_is_ignored",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "type(number) is int and 0",
        "isinstance(number, int) and 0",
        "tests/streams/test_bookmarks.py::test_a_line_that_is_not_quite_right_is_ignored_wherever_it_stands",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "0 <= number < AT_MOST",
        "0 <= number",
        "tests/streams/test_bookmarks.py::test_a_line_that_is_not_quite_right_is_ignored_wherever_it_stands",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "if read and not found:",
        "if False:",
        "tests/streams/test_bookmarks.py::test_a_shard_that_was_changed_since_is_said_once",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "fact in read if about == key]",
        "fact in read]",
        "tests/streams/test_bookmarks.py::test_bookmarks_of_another_binding_or_another_content_are_not_seen",
    ),
    Mutation(
        "_streams/bookmarks.py",
        'if not line.endswith(b"\\n") and len(line) < LONGEST:',
        "if False:",
        "tests/streams/test_bookmarks.py::test_a_line_that_is_still_being_written_is_read_when_it_is_whole",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "        self._settle(fact.shard)\n",
        "",
        "tests/streams/test_bookmarks.py::test_bookmarks_write_what_is_news_and_only_then_make_a_file",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "self._write([news.before, fact])",
        "self._write([fact])",
        "tests/streams/test_bookmarks.py::test_a_contradiction_that_nobody_relied_on_is_logged_and_the_shard_is_not_trusted_any_more",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "        self._report(*found)\n",
        "",
        "tests/streams/test_bookmarks.py::test_a_contradiction_that_another_process_found_is_an_error_here_too",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "self._is_named = self._root is not None and self._root != os.path.abspath(default_folder())",
        "self._is_named = self._root is not None",
        "tests/streams/test_bookmarks.py::test_the_default_folder_need_not_be_writable",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "        if self._is_named:\n            self._check_folder()\n",
        "",
        "tests/streams/test_bookmarks.py::test_a_named_folder_that_cannot_be_written_is_refused_when_built",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "self._writes = False  #",
        "self._writes = True  #",
        "tests/streams/test_bookmarks.py::test_a_full_disk_costs_only_time",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "        if self._pid != os.getpid():\n            self._start()",
        "        if self._pid != os.getpid():\n            self._pid = os.getpid()",
        "tests/streams/test_bookmarks.py::test_a_fork_goes_on_with_what_its_parent_knew_and_writes_a_file_of_its_own",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "os.O_WRONLY | os.O_APPEND",
        "os.O_WRONLY",
        "tests/streams/test_bookmarks.py::test_threads_that_add_at_once_lose_nothing",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "if not os.path.isabs(cache):  # the",
        "if not cache:  # the",
        "tests/streams/test_bookmarks.py::test_the_default_folder_is_in_the_users_cache",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "None if folder is None else os.path.abspath(folder)",
        "None if folder is None else os.fspath(folder)",
        "tests/streams/test_bookmarks.py::test_a_relative_folder_stays_where_it_was",
    ),
    Mutation(
        "_streams/retrying.py",
        "                    number, tries = number + 1, 0",
        "                    tries = 0",
        "tests/streams/test_retrying.py::test_whatever_fails_every_record_comes_once_or_the_error",
    ),
    Mutation(
        "_streams/retrying.py",
        "number, tries = number + 1, 0",
        "number += 1",
        "tests/streams/test_retrying.py::test_pauses_double_and_begin_anew_after_a_record",
    ),
    Mutation(
        "_streams/retrying.py",
        "itertools.islice(records, number))) < number",
        "itertools.islice(records, number))) < 0",
        "tests/streams/test_retrying.py::test_a_shard_that_has_become_shorter_is_not_a_shard_that_ends",
    ),
    Mutation(
        "_streams/retrying.py",
        "return not isinstance(exc, FINAL)",
        "return True",
        "tests/streams/test_retrying.py::test_what_does_not_pass_is_raised_at_once",
    ),
    Mutation(
        "_streams/retrying.py",
        "    return any((kind.__module__",
        "    return False and any((kind.__module__",
        "tests/streams/test_retrying.py::test_errors_of_a_network_pass_though_they_are_no_oserrors",
    ),
    Mutation(
        "_streams/retrying.py",
        '(kind.__module__.partition(".")[0], kind.__name__) in NETWORK',
        "kind.__name__ in {name for _, name in NETWORK}",
        "tests/streams/test_retrying.py::test_an_error_of_that_name_from_elsewhere_does_not_pass",
    ),
    Mutation(
        "_streams/retrying.py",
        "if closing is None:",
        "if True:",
        "tests/streams/test_retrying.py::test_a_pause_ends_when_the_run_is_closed",
    ),
    Mutation(
        "_streams/retrying.py",
        "                stack.callback(_close, opened)\n",
        "",
        "tests/streams/test_retrying.py::test_what_was_opened_is_closed_in_the_middle_at_the_end_and_never_before_it_was_opened",
    ),
    Mutation(
        "_streams/retrying.py",
        "                if records is not opened:\n                    stack.callback(_close, records)\n",
        "",
        "tests/streams/test_retrying.py::test_what_was_opened_is_closed_in_the_middle_at_the_end_and_never_before_it_was_opened",
    ),
    Mutation(
        "_streams/retrying.py",
        "open(shard, start=number) if seeks",
        "open(shard, start=start) if seeks",
        "tests/streams/test_retrying.py::test_it_seeks_to_the_record_at_which_it_failed",
    ),
    Mutation(
        "_streams/retrying.py",
        "opened = open(shard, start=number)",
        "opened = open(shard)",
        "tests/streams/test_retrying.py::test_it_seeks_to_the_record_at_which_it_failed",
    ),
    Mutation(
        "_streams/lanes.py",
        "if outputs is None or self._first + outputs > number:",
        "if outputs is None or self._first + outputs > number + 1:",
        "tests/laws/test_lanes.py::test_resume_at_every_step",
    ),
    Mutation(
        "_streams/lanes.py",
        "            if number < self._first:\n                self._rewind()\n",
        "",
        "tests/laws/test_lanes.py::test_reading_backwards_is_slow_and_right",
    ),
    Mutation(
        "_streams/lanes.py",
        "            self._drop()  # after an error nobody knows where it stands in the shard\n",
        "            pass\n",
        "tests/laws/test_lanes.py::test_an_error_in_a_shard_leaves_the_lane_where_it_was",
    ),
    Mutation(
        "_nodes/sampler.py",
        'origin = after["origin"] + delivered + (epoch - after["epoch"] - 1) * self._n',
        "origin = epoch * self._n",
        "tests/laws/test_lanes.py::test_an_epoch_begins_where_the_one_before_was_left",
    ),
    Mutation(
        "_nodes/sampler.py",
        'delivered = after["position"] - after.get("left", 0) or self._n',
        'delivered = after["position"] or self._n',
        "tests/laws/test_lanes.py::test_wherever_epochs_end_no_record_is_passed_over",
    ),
    Mutation(
        "_nodes/batcher.py",
        "self._leaves = drop_last and self.continues",
        "self._leaves = False",
        "tests/laws/test_lanes.py::test_an_epoch_without_another_batch_is_over",
    ),
    Mutation(
        "_nodes/batcher.py",
        "            if self.continues:\n                self.source.finish()\n            else:\n                self.source.take(left)",
        "            self.source.take(left)",
        "tests/laws/test_lanes.py::test_an_epoch_without_another_batch_is_over",
    ),
    Mutation(
        "_random/lane_order.py",
        "(places + pass_ % self.shards) % self.shards",
        "places",
        "tests/laws/test_lanes.py::test_in_the_long_run_every_record_comes_as_often",
    ),
    Mutation(
        "_random/lane_order.py",
        "pass_, place = divmod(deal, self.shards)",
        "pass_, place = 0, deal % self.shards",
        "tests/laws/test_lanes.py::test_all_ranks_together_read_one_sequence_and_each_record_once_in_a_pass",
    ),
    Mutation(
        "_random/lane_mix_order.py",
        "items = numbers[chosen] * self.lanes + lane",
        "items = numbers[chosen]",
        "tests/laws/test_lane_mix.py::test_each_lane_has_the_exact_shares_and_each_source_goes_on",
    ),
    Mutation(
        "_random/lane_mix_order.py",
        "mixed((mixed(self._seed + GAMMA) ^ lane) + GAMMA) >> 1",
        "self._seed",
        "tests/laws/test_lane_mix.py::test_the_lanes_are_mixed_independently",
    ),
    # Steps over a shard.
    Mutation(
        "_streams/steps.py",
        "while heap and heap[0][0] <= place << 32:",
        "while heap and heap[0][0] <= place + 2 << 32:",
        "tests/streams/test_steps.py::test_shuffle_is_the_sliding_shuffle",
    ),
    Mutation(
        "_streams/steps.py",
        "            place = run.place\n",
        "            place = arrived\n",
        "tests/streams/test_steps.py::test_a_filter_does_not_change_the_order_of_the_rest",
    ),
    Mutation(
        "_streams/steps.py",
        "arrived, run.at, record))",
        "arrived, Tag(run.at.number), record))",
        "tests/streams/test_steps.py::test_a_record_goes_on_drawing_where_it_stopped",
    ),
    Mutation(
        "_streams/steps.py",
        "                _, _, run.at, output = heappop(heap)\n                run.place",
        "                _, _, _, output = heappop(heap)\n                run.place",
        "tests/streams/test_steps.py::test_sample_is_the_record_also_behind_filter_and_shuffle",
    ),
    Mutation(
        "_streams/steps.py",
        "            cursor.at = tag\n",
        "",
        "tests/streams/test_steps.py::test_a_step_that_is_resumed_is_at_its_own_record",
    ),
    Mutation(
        "_streams/steps.py",
        "            with contextlib.suppress(Exception):\n                self.close()\n",
        "",
        "tests/streams/test_steps.py::test_a_run_that_failed_does_not_look_like_one_that_ended",
    ),
    Mutation(
        "_streams/steps.py",
        "if items.gi_frame is not None and _frames",
        "if items.gi_frame is None and _frames",
        "tests/streams/test_steps.py::test_a_stray_stop_iteration_does_not_end_the_shard[map]",
    ),
    Mutation(
        "_streams/steps.py",
        "if items.gi_frame is not None and _frames",
        "if _frames",
        "tests/streams/test_steps.py::test_an_iterator_may_end_where_it_wants",
    ),
    Mutation(
        "_streams/steps.py",
        "    finally:\n        _close(outputs)\n",
        "    finally:\n        pass\n",
        "tests/streams/test_steps.py::test_everything_is_closed_at_the_end_after_an_error_and_by_close",
    ),
    Mutation(
        "_streams/steps.py",
        "            raise\n        finally:\n            current.reset(token)\n        self.close()\n",
        "            raise\n        finally:\n            current.reset(token)\n",
        "tests/streams/test_steps.py::test_everything_is_closed_at_the_end_after_an_error_and_by_close",
    ),
    Mutation(
        "_streams/steps.py",
        "            if shuffled and not getattr",
        "            if False and not getattr",
        "tests/streams/test_steps.py::test_dependence_on_the_pass_is_seen",
    ),
    Mutation(
        "_streams/steps.py",
        "        if id(self) not in run.listed:",
        "        if False:",
        "tests/streams/test_steps.py::test_dependence_on_the_pass_is_seen",
    ),
    Mutation(
        "_streams/steps.py",
        "            if before is not None and _looked() != before:",
        "            if False:",
        "tests/streams/test_steps.py::test_a_step_must_not_draw_from_the_global_generators",
    ),
    Mutation(
        "_streams/run_cursor.py",
        "        self._facts.used = True\n        return self._facts.pass_",
        "        return self._facts.pass_",
        "tests/streams/test_steps.py::test_dependence_on_the_pass_is_seen",
    ),
    Mutation(
        "_streams/run_cursor.py",
        "epoch_word(seed, shard)",
        "epoch_word(seed, 0)",
        "tests/streams/test_steps.py::test_draws_differ_by_seed_pass_and_shard",
    ),
    Mutation(
        "_streams/run_cursor.py",
        "2 * self.shuffles)[-2:]",
        "2 * self.shuffles)[:2]",
        "tests/streams/test_steps.py::test_two_shuffles_are_not_the_same_one_twice",
    ),
    Mutation(
        "_streams/steps.py",
        "offsets = self._offsets(block, *keys)",
        "offsets = self._offsets(0, *keys)",
        "tests/streams/test_steps.py::test_shuffle_is_the_sliding_shuffle",
    ),
    Mutation(
        "_streams/steps.py",
        'f"at record {self._cursor.at.number} of',
        'f"at record {self._cursor.records} of',
        "tests/streams/test_steps.py::test_an_error_names_the_record",
    ),
    Mutation(
        "_streams/steps.py",
        "            stack.callback(_close, records)\n",
        "",
        "tests/streams/test_steps.py::test_everything_is_closed_at_the_end_after_an_error_and_by_close",
    ),
    Mutation(
        "_streams/steps.py",
        "            for stage in stages:\n                stack.callback(stage.close)\n",
        "",
        "tests/streams/test_steps.py::test_an_error_while_closing_closes_the_rest",
    ),
    Mutation(
        "_streams/run_cursor.py",
        "if tag.made is None:",
        "if True:",
        "tests/streams/test_steps.py::test_a_record_goes_on_drawing_where_it_stopped",
    ),
    Mutation(
        "_streams/steps.py",
        "self._cursor.facts.used or not self._ended",
        "self._cursor.facts.used",
        "tests/streams/test_steps.py::test_what_was_cut_short_may_depend_on_the_pass",
    ),
    Mutation(
        "_streams/pack_step.py",
        "        while len(waiting):\n",
        "        while len(waiting) > 1:\n",
        "tests/streams/test_steps.py::test_pack_lays_out_every_sequence_once",
    ),
    Mutation(
        "_streams/pack_step.py",
        "for start in range(0, end, self.capacity):",
        "for start in range(0, max(end - end % self.capacity, min(end, 1)), self.capacity):",
        "tests/streams/test_steps.py::test_pack_lays_out_every_sequence_once",
    ),
    Mutation(
        "_streams/pack_step.py",
        "while len(waiting) >= self.window and waiting.total >= 2 * self.capacity:",
        "while len(waiting) >= self.window:",
        "tests/streams/test_steps.py::test_tiny_sequences_wait_for_more_than_a_row",
    ),
    Mutation(
        "_streams/pack_step.py",
        "self._gain = capacity // 128",
        "self._gain = 0",
        "tests/streams/test_steps.py::test_rows_are_full",
    ),
    Mutation(
        "_streams/pack_step.py",
        "row(last=True)",
        "row(last=False)",
        "tests/streams/test_steps.py::test_rows_are_full",
    ),
    Mutation(
        "_streams/pack_step.py",
        "if last else next(iter(self._pieces))",
        "if last else sizes[-1][1]",
        "tests/streams/test_steps.py::test_no_sequence_waits_forever",
    ),
    Mutation(
        "_streams/pack_step.py",
        "self._places[: piece.length]",
        "self._places[begin:total]",
        "tests/streams/test_steps.py::test_pack_lays_out_every_sequence_once",
    ),
    Mutation(
        "_streams/pack_step.py",
        "run.at, run.place = pieces[0].tag, number",
        "run.place = number",
        "tests/streams/test_steps.py::test_behind_a_pack_the_record_is_its_first_one",
    ),
    Mutation(
        "_streams/plain_values.py",
        "**(function.__kwdefaults__ or {}), ",
        "",
        "tests/streams/test_steps.py::test_the_code_hash_sees_what_may_change_the_outputs",
    ),
    Mutation(
        "_streams/plain_values.py",
        "defaults = function.__defaults__ or ()",
        "defaults = ()",
        "tests/streams/test_steps.py::test_the_code_hash_sees_what_may_change_the_outputs",
    ),
    Mutation(
        "_streams/plain_values.py",
        "for base in filter(_is_users, reversed(kind.__mro__)):",
        "for base in [kind]:",
        "tests/streams/test_steps.py::test_the_code_hash_sees_what_may_change_the_outputs",
    ),
    Mutation(
        "_streams/plain_values.py",
        "names = (code.co_names, ",
        "names = (",
        "tests/streams/test_steps.py::test_the_code_hash_sees_what_may_change_the_outputs",
    ),
    Mutation(
        "_streams/plain_values.py",
        "return sorted(self._all(value, where), key=text_of)",
        "return self._all(value, where)",
        "tests/streams/test_steps.py::test_hash_and_values_are_the_same_in_every_process",
    ),
    Mutation(
        "_streams/plain_values.py",
        "[base.__qualname__ for base in kind.__mro__]",
        "[base.__module__ for base in kind.__mro__]",
        "tests/streams/test_steps.py::test_hash_and_values_are_the_same_in_every_process",
    ),
    Mutation(
        "_streams/uncounted.py",
        'said["held"] = step_values(self._steps)',
        'said["held"] = {}',
        "tests/laws/test_lanes.py::test_the_step_that_differs_is_named",
    ),
    Mutation(
        "_streams/bookmarks.py",
        "if fact.shard not in self._settled:",
        "if False:",
        "tests/streams/test_bookmarks.py::test_a_key_is_looked_up_only_where_it_is_needed",
    ),
    # Disks and networks that break off.
    Mutation(
        "_streams/uncounted.py",
        "retries=self._retries, seeks=self._seeks,",
        "retries=self._retries,",
        "tests/streams/test_uncounted.py::test_an_open_that_can_begin_anywhere_is_asked_for_the_record_after_a_fault",
    ),
    Mutation(
        "_streams/uncounted.py",
        "        for facts in (self._cut, self._always, self._passes):\n            if facts is not None:\n",
        "        for facts in (self._always, self._passes):\n            if facts is not None:\n",
        "tests/streams/test_uncounted.py::test_a_jump_learns_what_another_process_has_cut_short",
    ),
    Mutation(
        "_streams/uncounted.py",
        'lanes = self._read_by.setdefault("lanes", ',
        'lanes = self._read_by["lanes"] = (',
        "tests/streams/test_faults.py::test_threads_that_come_first_together_read_with_the_same_lanes",
    ),
    Mutation(
        "_streams/uncounted.py",
        "with contextlib.closing(records):",
        "with contextlib.nullcontext():",
        "tests/streams/test_faults.py::test_a_file_that_is_cut_short_is_an_error_that_names_it_and_not_its_end",
    ),
    Mutation(
        "_streams/retrying.py",
        "gives_up = not may_pass(exc) or tries > retries",
        "gives_up = True",
        "tests/streams/test_faults.py::test_a_disk_that_breaks_off_again_and_again_changes_nothing",
    ),
    Mutation(
        "_streams/retrying.py",
        "itertools.islice(records, number))",
        "itertools.islice(records, number + 1))",
        "tests/streams/test_faults.py::test_a_disk_that_breaks_off_again_and_again_changes_nothing",
    ),
    Mutation(
        "_streams/lanes.py",
        "            self._drop()  # after an error",
        "            pass  # after an error",
        "tests/streams/test_faults.py::test_a_fault_that_lasts_is_raised_with_shard_and_record_and_a_resume_goes_on_from_there",
    ),
    Mutation(
        "_streams/lanes.py",
        "        self.closing.set()\n",
        "",
        "tests/streams/test_faults.py::test_closing_the_data_ends_the_pauses_of_its_readers",
    ),
    Mutation(
        "_streams/jsonl.py",
        "                    record = Unreadable(exc)",
        "                    return",
        "tests/streams/test_faults.py::test_a_file_that_is_cut_short_is_an_error_that_names_it_and_not_its_end",
    ),
    Mutation(
        "_streams/lanes.py",
        "is_set():\n                raise\n",
        "is_set():\n                return _END\n",
        "tests/streams/test_faults.py::test_a_missing_shard_is_an_error_or_is_left_out",
    ),
    # A stream, attacked.
    Mutation(
        "_nodes/sampler.py",
        'delivered = after["position"] - after.get("left", 0) or self._n',
        'delivered = after["position"] - after.get("left", 0)',
        "tests/laws/test_lanes.py::test_set_epoch_before_the_first_batch_goes_as_far_as_reading_does",
    ),
    Mutation(
        "_nodes/sampler.py",
        'if state["origin"] > state["epoch"] * most:',
        "if False:",
        "tests/laws/test_lanes.py::test_a_hostile_state_is_refused",
    ),
    Mutation(
        "_nodes/sampler.py",
        "self.order.settings_at(epoch, origin + min(position, self._n))",
        "self.order.settings_at(epoch, epoch * self._n + min(position, self._n))",
        "tests/laws/test_lane_mix.py::test_stages_ahead_of_a_state_may_change",
    ),
    Mutation(
        "_nodes/sharder.py",
        'if self.tail == "exact" and self.continues:',
        "if False:",
        "tests/laws/test_lanes.py::test_what_cannot_be_right_with_a_stream_is_refused",
    ),
    Mutation(
        "_streams/uncounted.py",
        "        if not self._ordered:\n            raise TypeError(",
        "        if False:\n            raise TypeError(",
        "tests/laws/test_lanes.py::test_whoever_asks_by_index_is_refused",
    ),
    Mutation(
        "_streams/uncounted.py",
        "return isinstance(self._shards[0], int)",
        "return False",
        "tests/streams/test_uncounted.py::test_bookmarks_are_those_of_the_same_data_and_code",
    ),
    Mutation(
        "_streams/uncounted.py",
        "self._steps if self._is_numbered else [*self._steps, self._open]",
        "self._steps",
        "tests/streams/test_uncounted.py::test_bookmarks_are_those_of_the_same_data_and_code",
    ),
    Mutation(
        "_streams/uncounted.py",
        "self._keys = keys\n",
        "self._keys = keys = list(keys)\n",
        "tests/streams/test_uncounted.py::test_a_file_is_looked_at_when_its_turn_comes",
    ),
    Mutation(
        "_streams/uncounted.py",
        "            mark_of_stream(exc)\n",
        "",
        "tests/streams/test_uncounted.py::test_the_loader_leaves_out_items_and_not_what_lies_behind_an_error",
    ),
    Mutation(
        "_streams/lanes.py",
        "not self._lanes.skips or self._lanes.closing.is_set()",
        "not self._lanes.skips",
        "tests/streams/test_uncounted.py::test_a_shard_that_is_closed_in_a_pause_is_not_cut_short",
    ),
    Mutation(
        "_streams/lanes.py",
        "self._deal, self._first = self._deal + deal.lanes, self._next  #",
        "self._deal = self._deal + deal.lanes\n        self._first = self._next  #",
        "tests/loader/test_interrupts.py::test_an_interrupt_at_any_line_of_next_loses_and_counts_nothing[1-lanes]",
    ),
    Mutation(
        "_streams/lanes.py",
        "max(self._most_kept, 1 << (back - 1).bit_length())",
        "min(2 * self._most_kept, MOST_KEPT)",
        "tests/laws/test_lanes.py::test_epochs_left_early_do_not_make_the_lanes_keep_more",
    ),
    Mutation(
        "_streams/lanes.py",
        "            self._go_on()\n            self._say_if_slow(number)\n",
        "            self._go_on()\n",
        "tests/laws/test_lanes.py::test_a_long_search_is_said_even_where_no_shard_is_opened",
    ),
    Mutation(
        "_streams/steps.py",
        "if getgeneratorstate(items) == GEN_CREATED:",
        "if False:",
        "tests/streams/test_steps.py::test_a_function_of_one_record_as_a_step_is_told_what_to_use",
    ),
    Mutation(
        "_streams/steps.py",
        "if getgeneratorstate(items) == GEN_CREATED:",
        "if True:",
        "tests/streams/test_steps.py::test_a_function_of_one_record_as_a_step_is_told_what_to_use",
    ),
    Mutation(
        "_loader/state_dict.py",
        "if isinstance(saved, list) and isinstance(now, list):",
        "if False:",
        "tests/laws/test_lanes.py::test_the_step_that_differs_is_named",
    ),
    Mutation(
        "_streams/steps.py",
        "if id(iterator) == id(step):",
        "if False:",
        "tests/streams/test_steps.py::test_a_step_that_is_its_own_iterator_is_refused",
    ),
    # What objects say of themselves.
    Mutation(
        "_arguments.py",
        "    except Exception:  # of a user's class, or of an object that was not built to its end",
        "    except ValueError:",
        "tests/loader/test_graph.py::test_an_object_that_was_never_built_shows_itself",
    ),
    Mutation(
        "_arguments.py",
        "            text = kind.__name__\n    except",
        "            text = repr(value)\n    except",
        "tests/loader/test_graph.py::test_no_user_object_is_looked_into",
    ),
    Mutation(
        "_loader/graph.py",
        "type(dataset) in (Subset, list, tuple, ConcatDataset)",
        "hasattr(dataset, '__len__')",
        "tests/loader/test_graph.py::test_no_user_object_is_looked_into",
    ),
    Mutation(
        "_loader/loader.py",
        "            if unfinished is None:\n                cursor",
        "            if True:\n                cursor",
        "tests/loader/test_graph.py::test_a_signal_handler_in_the_middle_of_next_sees_the_batch_before",
    ),
    Mutation(
        "_loader/graph.py",
        "{html.escape(name)}",
        "{name}",
        "tests/loader/test_graph.py::test_html_is_escaped_and_needs_nothing_from_elsewhere",
    ),
    Mutation(
        "_loader/graph.py", '"{_mermaid_text(name)}"', '"{name}"', "tests/loader/test_graph.py::test_mermaid_text_means_nothing_to_mermaid"
    ),
    Mutation(
        "_fetch/padding.py",
        "            if length:  # an empty sample may be of another dtype and of fewer dimensions",
        "            if True:",
        "tests/fetch/test_padding.py::test_empty_samples_say_nothing",
    ),
    Mutation(
        "_fetch/padding.py",
        'return torch.full((), value, dtype=dtype, device="cpu").numpy()[()]',
        "return value",
        "tests/fetch/test_padding.py::test_a_value_too_large_for_half_precision_is_infinite",
    ),
    Mutation(
        "_fetch/padding.py",
        "in zip(waiting, allocate([fields[name].spec for name in waiting]), strict=True):",
        "in [(name, allocate([fields[name].spec])[0]) for name in waiting]:",
        "tests/fetch/test_padding.py::test_what_is_padded_is_written_into_the_memory_of_the_batch",
    ),
    Mutation(
        "_fetch/fetch.py",
        "if type(self.collate_fn) is Padded else",
        "if False else",
        "tests/fetch/test_padding.py::test_what_is_padded_is_written_into_the_memory_of_the_batch",
    ),
    # The command line.
    Mutation(
        "_observe/explain.py",
        'f"{length - position:,} are left"',
        'f"{length - epoch:,} are left"',
        "tests/observe/test_explain.py::test_a_state_in_the_middle_of_an_epoch",
    ),
    Mutation(
        "_observe/explain.py",
        "elif isinstance(one, list | tuple):\n            inside",
        "elif isinstance(one, tuple):\n            inside",
        "tests/observe/test_explain.py::test_states_inside_a_checkpoint_of_torch",
    ),
    Mutation(
        "_observe/explain.py",
        "weights_only=True, mmap",
        "weights_only=False, mmap",
        "tests/observe/test_explain.py::test_nothing_in_a_file_runs",
    ),
    Mutation(
        "_observe/explain.py",
        "{cut(text, 1000)}",
        "{text}",
        "tests/observe/test_explain.py::test_a_state_with_anything_inside_is_explained_in_printable_lines",
    ),
    Mutation(
        "_observe/bench.py",
        "came = time.perf_counter()\n            if step_s:\n                time.sleep(step_s)",
        "if step_s:\n                time.sleep(step_s)\n            came = time.perf_counter()",
        "tests/observe/test_bench.py::test_waits_steps_and_boundaries_are_told_apart",
    ),
    Mutation(
        "_observe/bench.py",
        "loop.boundaries.append(len(loop.waits))",
        "loop.boundaries.append(len(loop.waits) + 1)",
        "tests/observe/test_bench.py::test_waits_steps_and_boundaries_are_told_apart",
    ),
    Mutation(
        "_observe/bench.py",
        "{1 / (step * found.stepped.batches_per_s):.2f} x",
        "{1 / (1 - found.stepped.stall / 2):.2f} x",
        "tests/observe/test_bench.py::test_headspace_is_how_much_faster_the_loop_would_be_without_waits",
    ),
    Mutation(
        "_observe/target.py",
        "!= os.path.join(folder, file)",
        "is None",
        "tests/observe/test_bench.py::test_a_file_that_workers_could_not_import_is_refused",
    ),
    Mutation(
        "_observe/target.py", ', "drop_last": given.drop_last}', "}", "tests/observe/test_bench.py::test_the_same_data_gets_other_workers"
    ),
    Mutation(
        "_observe/compare.py",
        "_ALIKE: Final = 0.95",
        "_ALIKE: Final = 1.0",
        "tests/observe/test_bench.py::test_the_simplest_of_the_fastest_is_recommended",
    ),
    Mutation(
        "_observe/memory.py",
        "while grown := {pid for pid, parent in parents.items() if parent in family} - family:",
        "while grown := set[int]():",
        "tests/observe/test_bench.py::test_memory_is_that_of_all_processes",
    ),
    Mutation(
        "__init__.py",
        '__version__ = "0.1.0"',
        '__version__ = "0.1.0"\nfrom penstock._errors import PenstockError',
        "tests/project/test_front_door.py::test_importing_penstock_imports_nothing_else",
    ),
    Mutation(
        "__init__.py",
        '("SequentialOrder", "ShuffledOrder", "TorchOrder", "WeightedOrder")',
        '("SequentialOrder", "ShuffledOrder", "TorchOrder")',
        "tests/project/test_front_door.py::test_type_checkers_and_python_are_told_the_same_homes",
    ),
    Mutation(
        "__init__.py",
        "sorted({*globals(), *__all__}",
        "sorted({*globals()}",
        "tests/project/test_front_door.py::test_every_name_is_listed_before_it_is_loaded",
    ),
    Mutation(
        "_nodes/node.py",
        '    __module__ = "penstock"\n\n    epoch: int',
        "    epoch: int",
        "tests/project/test_front_door.py::test_a_pickle_made_elsewhere_finds_its_class_through_the_door",
    ),
    Mutation(
        "_nodes/parallel_mapper.py",
        "                from penstock._workers.thread_pool import ThreadPool\n",
        "                from penstock._workers.process_pool import ProcessPool\n                from penstock._workers.thread_pool import ThreadPool\n",
        "tests/project/test_front_door.py::test_a_loader_imports_only_what_it_uses",
    ),
    Mutation(
        "_loader/canonical_graph.py",
        "from penstock._nodes.cycler import Cycler\n",
        "from penstock._nodes.cycler import Cycler\nfrom penstock._nodes.grouper import Grouper\n",
        "tests/project/test_front_door.py::test_a_loader_imports_only_what_it_uses",
    ),
    Mutation(
        "_nodes/__init__.py",
        "Node._adapter = _adapted\n",
        "",
        "tests/project/test_front_door.py::test_a_node_of_torchdata_needs_no_import_of_ours_first",
    ),
    # How far long work is.
    Mutation(
        "_streams/progress.py",
        "self._due = now + LINE_S",
        "self._due = now",
        "tests/streams/test_progress.py::test_lines_come_ten_seconds_apart",
    ),
    Mutation(
        "_streams/progress.py",
        "trace: TracebackType | None) -> None:\n        self.clear()",
        "trace: TracebackType | None) -> None:\n        pass",
        "tests/streams/test_progress.py::test_a_bar_is_drawn_over_itself_and_taken_away",
    ),
    Mutation(
        "_streams/progress.py",
        "if threading.current_thread() is not threading.main_thread() or multiprocessing.parent_process() is not None:",
        "if multiprocessing.parent_process() is not None:",
        "tests/streams/test_progress.py::test_only_the_main_thread_draws",
    ),
    Mutation(
        "_streams/progress.py",
        "contextlib.suppress(OSError, ValueError)",
        "contextlib.suppress(OSError)",
        "tests/streams/test_progress.py::test_a_terminal_that_is_gone_does_not_end_the_work",
    ),
    Mutation(
        "_datasets/cached.py",
        "np.asarray(self._opened().entries) == 0",
        "np.asarray(self._opened().entries) >= 0",
        "tests/streams/test_progress.py::test_a_cache_is_filled",
    ),
    Mutation(
        "_streams/lanes.py",
        "self._spoke = now if now - last > LINE_S else last",
        "self._spoke = now",
        "tests/streams/test_progress.py::test_a_search_in_a_lane_shows_how_far_it_is",
    ),
    Mutation(
        "__init__.py",
        'if name in ("formats", "testing"):',
        'if name in ("testing",):',
        "tests/project/test_architecture.py::test_the_public_modules_need_no_import_of_their_own",
    ),
    Mutation(
        "_streams/open_shards.py",
        "with suppress(Exception):",
        "with contextlib.suppress(Exception):",
        "tests/project/test_docs.py::test_python_blocks_of_a_page_run[docs/recipes.md]",
    ),
    Mutation(
        "formats.py",
        '__all__ = ["arrow", "hf",',
        '__all__ = ["annotations", "arrow", "hf",',
        "tests/project/test_docs.py::test_every_public_name_has_one_entry_in_the_reference",
    ),
    Mutation(
        "_workers/processes/scheduler.py",
        "has killed two workers; the last of them",
        "killed two workers; the last of them",
        "tests/project/test_docs.py::test_messages_in_the_troubleshooting_are_those_of_the_code",
    ),
    Mutation(
        "_loader/canonical_graph.py",
        "            run_ahead: Load the first batches",
        "            runs_ahead: Load the first batches",
        "tests/project/test_typing.py::test_every_argument_of_from_dataset_explains_itself",
    ),
    Mutation(
        "_nodes/to_device.py",
        "self._sent if streams.records else self._sent_behind_the_consumer",
        "self._sent",
        "tests/nodes/test_to_device.py::test_where_tensors_cannot_record_streams_a_copy_waits_for_the_consumer",
    ),
    # What type checkers and editors are shown.
    Mutation(
        "_memory/devices.py",
        "return leaf if type(pinned) in (dict, list)",
        "return leaf if type(pinned) is dict",
        "tests/memory/test_tree.py::test_pin_keeps_what_torch_would_make_a_list",
    ),
    Mutation(
        "_memory/tree.py",
        "        vars(other).update(vars(tree))\n",
        "        pass\n",
        "tests/memory/test_tree.py::test_a_tuple_keeps_its_class_and_its_attributes",
    ),
    Mutation(
        "_memory/tree.py",
        "    if isinstance(tree, tuple | list):\n",
        "    if isinstance(tree, tuple):\n",
        "tests/memory/test_tree.py::test_a_list_keeps_its_class_and_its_attributes",
    ),
    Mutation(
        "_memory/tree.py",
        "isinstance(tree, list | tuple | UserList):",
        "type(tree) is list or isinstance(tree, tuple):",
        "tests/memory/test_tree.py::test_leaves_only_looks",
    ),
    Mutation(
        "_memory/tree.py",
        "    if isinstance(tree, tuple | list):\n        return _like(",
        '    if hasattr(tree, "_fields"):\n        return _like(',
        "tests/memory/test_tree.py::test_mapped_rebuilds_what_checks_itself",
    ),
    Mutation(
        "_loader/canonical_graph.py",
        "            plan_ahead: Draw the next epoch",
        "            plan_ahead: See `SamplerWrapper`. Draw the next epoch",
        "tests/project/test_typing.py::test_every_argument_of_from_dataset_explains_itself",
    ),
    Mutation(
        "_loader/canonical_graph.py",
        "        in_order: bool = True,",
        "        in_order: bool = False,",
        "tests/project/test_typing.py::test_the_overloads_of_from_dataset_have_its_arguments",
    ),
    Mutation(
        "_loader/loader.py",
        "collate_fn: None = None,",
        "collate_fn: Callable[[Any], Any] | None = None,",
        "tests/project/test_typing.py::test_mypy_knows_what_a_loop_gets",
    ),
    Mutation(
        "_loader/loader.py",
        "self: Loader[Any], root: BaseNode[Indices]",
        "self: Loader[Indices], root: BaseNode[Indices]",
        "tests/project/test_typing.py::test_mypy_knows_what_a_loop_gets",
    ),
    Mutation(
        "__init__.py",
        "    from penstock import formats as formats\n",
        "",
        "tests/project/test_typing.py::test_mypy_knows_what_a_loop_gets",
    ),
    Mutation(
        "_nodes/node.py",
        "if TYPE_CHECKING:  # torchdata has no types",
        "if not TYPE_CHECKING:  # torchdata has no types",
        "tests/project/test_typing.py::test_mypy_knows_what_a_loop_gets",
    ),
    Mutation(
        "_loader/loader.py",
        "_check_root(root, misplaced, dataset_words)",
        "_check_root(root, (), dataset_words)",
        "tests/compatibility/test_dataloader_words.py::test_a_dataset_given_to_loader_itself_is_shown_the_way",
    ),
    # Traces.
    Mutation(
        "_observe/trace.py",
        "[_json(value) for value in indices.values[:_MOST_INDICES]]",
        "[_json(value) for value in indices.values[:1]]",
        "tests/observe/test_trace.py::test_every_batch_wait_and_epoch_is_there",
    ),
    Mutation(
        "_observe/trace.py",
        "            watched.leave()\n",
        "            watched\n",
        "tests/observe/test_trace.py::test_a_loader_goes_on_before_and_after_a_trace",
    ),
    Mutation(
        "_observe/trace.py",
        "if os.fstat(file.fileno()).st_nlink:",
        "if file:",
        "tests/observe/test_trace.py::test_a_loader_goes_on_before_and_after_a_trace",
    ),
    Mutation(
        "_observe/trace.py",
        "_Watched] = weakref.WeakKeyDictionary()",
        "_Watched] = {}  # type: ignore",
        "tests/observe/test_trace.py::test_a_traced_loader_that_is_dropped_is_freed",
    ),
    Mutation(
        "_observe/trace.py",
        "        self._step(begin)\n        self._came = _now()",
        "        self._came = _now()\n        self._step(begin)",
        "tests/observe/test_trace.py::test_every_batch_wait_and_epoch_is_there",
    ),
    Mutation(
        "_observe/trace.py",
        "        self._came = None\n        is_end",
        "        is_end",
        "tests/observe/test_trace.py::test_every_batch_wait_and_epoch_is_there",
    ),
    Mutation(
        "_observe/trace.py",
        '    open(path, "w").close()  # whoever',
        "    # whoever",
        "tests/observe/test_trace.py::test_a_file_that_cannot_be_written_is_refused_at_once",
    ),
    Mutation(
        "_observe/trace.py",
        "            if failure is None:\n                raise",
        "            raise",
        "tests/observe/test_trace.py::test_a_full_disk_hides_no_error_of_the_training",
    ),
    Mutation(
        "_observe/trace.py",
        "            with contextlib.suppress(OSError):  # a full disk must not end the training",
        "            with contextlib.nullcontext():",
        "tests/observe/test_trace.py::test_a_full_disk_does_not_end_the_work_of_a_worker",
    ),
    Mutation(
        "_loader/loop_clock.py",
        "            if at == _MOMENTS:\n                self._work_out(at)",
        "            self.at = at\n            if at == _MOMENTS:\n                self._work_out(at)",
        "tests/observe/test_report.py::test_an_interrupt_while_moments_are_worked_out_leaves_room_for_the_next",
    ),
    Mutation(
        "_loader/report.py",
        "    except Exception:  # of a user's __getattr__",
        "    except AttributeError:",
        "tests/observe/test_report.py::test_objects_that_answer_nothing_end_neither_the_report_nor_the_loop",
    ),
    Mutation(
        "_loader/loader.py",
        "        except Exception:  # of a user's object; the batch",
        "        except AttributeError:  # of a user's object; the batch",
        "tests/observe/test_report.py::test_objects_that_answer_nothing_end_neither_the_report_nor_the_loop",
    ),
    Mutation(
        "_loader/report.py",
        "mine, whole = max(seconds), sum(seconds)",
        "mine, whole = seconds[2] if names.collate == names.transform else max(seconds), sum(seconds)",
        "tests/observe/test_report.py::test_stages_of_one_name_are_told_apart",
    ),
    Mutation(
        "_loader/report.py",
        ' if names.load.endswith(".__getitem__") else ""',
        "",
        "tests/observe/test_report.py::test_only_a_dataset_is_told_to_have_getitems",
    ),
    Mutation("_observe/trace.py", "        _under_way.clear()\n", "", "tests/observe/test_trace.py::test_one_trace_at_a_time"),
    Mutation(
        "_fetch/task.py",
        "from penstock._fetch.packing import PackView\n",
        "from penstock._fetch.packing import PackView\nfrom penstock._nodes.node import Node\n",
        "tests/project/test_front_door.py::test_a_spawned_worker_imports_only_what_its_work_needs",
    ),
    Mutation(
        "_loader/loader.py",
        "*noted, exc.__context__ is not None",
        "*noted, False",
        "tests/loader/test_interrupts.py::test_an_interrupt_while_an_error_is_on_its_way_out_hides_no_batch[threads]",
    ),
    Mutation(
        "_workers/meter.py",
        "raise (exc.__cause__ or exc) from None",
        "raise",
        "tests/observe/test_statistics.py::test_an_interrupt_in_a_look_at_the_processor_stays_an_interrupt",
    ),
    Mutation(
        "_loader/report.py",
        'source, "transform")',
        "source)",
        "tests/observe/test_report.py::test_a_slow_iterable_is_named[inline]",
    ),
    Mutation(
        "_observe/explain.py",
        ".lstrip(_BEFORE_JSON)",
        ".lstrip()",
        "tests/observe/test_explain.py::test_json_as_other_programs_write_it[utf-16]",
    ),
    Mutation(
        "_loader/picture.py",
        "node.workers.workers * node.consumer_wait_s",
        "node.consumer_wait_s",
        "tests/loader/test_picture.py::test_the_shares_are_those_of_the_statistics",
    ),
    Mutation(
        "_loader/picture.py",
        '"waits": statistics.waits.total_s,',
        '"waits": statistics.waits.total_s + statistics.boundary_waits.total_s,',
        "tests/loader/test_picture.py::test_the_shares_are_those_of_the_statistics",
    ),
    Mutation(
        "_nodes/watch.py",
        "                if before:\n",
        "                if False:\n",
        "tests/observe/test_trace.py::test_every_batch_wait_and_epoch_is_there",
    ),
    Mutation(
        "_observe/trace.py",
        'loader._clock.read = vars(node)["next"]',
        "pass",
        "tests/observe/test_trace.py::test_every_batch_wait_and_epoch_is_there",
    ),
    Mutation(
        "_streams/steps.py",
        "tag = Tag(number) if number else at",
        "tag = at",
        "tests/streams/test_read_ahead.py::test_the_items_are_those_of_shards_run_one_by_one",
    ),
    Mutation(
        "_streams/steps.py",
        "            cursor.at, record = ahead.popleft()\n            tag = cursor.at\n",
        "            tag, record = ahead.popleft()\n",
        "tests/streams/test_read_ahead.py::test_the_items_are_those_of_shards_run_one_by_one",
    ),
    Mutation(
        "_streams/steps.py",
        "return bool(self._ahead) or self._cursor.exhausted",
        "return self._cursor.exhausted",
        "tests/streams/test_read_ahead.py::test_an_item_costs_one_record",
    ),
    Mutation(
        "_streams/lanes.py",
        "                    if self._run.owes:\n                        self._read_ahead()\n",
        "",
        "tests/streams/test_read_ahead.py::test_an_item_costs_one_record",
    ),
    Mutation(
        "_streams/steps.py",
        "if waiting < self._room:",
        "if True:",
        "tests/streams/test_read_ahead.py::test_no_more_records_wait_than_a_window_holds",
    ),
    Mutation(
        "_streams/steps.py",
        "                record = _Failed(exc)\n",
        "                raise\n",
        "tests/streams/test_read_ahead.py::test_an_error_in_the_next_shard_comes_when_its_items_do",
    ),
    Mutation(
        "_streams/steps.py",
        "                raise record.error\n",
        "                break\n",
        "tests/streams/test_read_ahead.py::test_an_error_in_the_next_shard_comes_when_its_items_do",
    ),
    Mutation(
        "_streams/lanes.py",
        "            self._drop()  # what was read ahead, if anything\n",
        "",
        "tests/streams/test_read_ahead.py::test_bookmarks_pass_over_the_shard_that_was_read_ahead",
    ),
    Mutation(
        "_memory/parcel.py",
        "return [buffer.tobytes() for buffer in buffers]",
        "return buffers",
        "tests/workers/test_process_pool.py::test_every_kind_of_value_arrives",
    ),
    Mutation(
        "_memory/parcel.py",
        "set(map(type, value)) == {bytes} and",
        "bytes in set(map(type, value)) and all(hasattr(one, '__len__') for one in value) and",
        "tests/workers/test_process_pool.py::test_every_kind_of_value_arrives",
    ),
    Mutation(
        "_memory/parcel.py",
        "return type(value) is list and set",
        "return type(value) in (list, tuple) and set",
        "tests/workers/test_process_pool.py::test_every_kind_of_value_arrives",
    ),
    Mutation(
        "_streams/steps.py",
        "        if not while_reading:\n            raise GraphError(",
        "        if False:\n            raise GraphError(",
        "tests/streams/test_steps.py::test_a_step_must_not_draw_from_the_global_generators",
    ),
    Mutation(
        "_streams/steps.py",
        "record := _watched(records, cursor) if cursor.watched else next(records, _END)",
        "record := next(records, _END)",
        "tests/streams/test_steps.py::test_what_reads_may_draw_from_the_global_generators",
    ),
    Mutation(
        "_streams/lanes.py",
        "isinstance(exc, GraphError) or not",
        "not",
        "tests/streams/test_steps.py::test_no_shard_is_skipped_because_a_step_draws",
    ),
    Mutation(
        "_workers/thread_pool.py",
        "    told_to_end.set(lambda: core.stopped)\n",
        "",
        "tests/streams/test_faults.py::test_closing_the_loader_ends_the_pauses_of_its_threads",
    ),
    Mutation(
        "_streams/lanes.py",
        "return self._event.is_set() or told_to_end.get()()",
        "return self._event.is_set()",
        "tests/streams/test_faults.py::test_closing_the_loader_ends_the_pauses_of_its_threads",
    ),
    Mutation(
        "_streams/lanes.py",
        "self._event.wait(min(left, _LOOK_S))",
        "self._event.wait(left)",
        "tests/streams/test_faults.py::test_closing_the_loader_ends_the_pauses_of_its_threads",
    ),
    Mutation(
        "_streams/open_shards.py",
        "            if not self._seeks:\n                _say_if_read_by_all(label)\n",
        "",
        "tests/streams/test_shards.py::test_worker_processes_that_all_read_every_shard_say_so",
    ),
    Mutation(
        "_streams/open_shards.py",
        "info.num_workers > 1 and info.id == 0 and not _said",
        "info.num_workers > 1 and not _said",
        "tests/streams/test_shards.py::test_worker_processes_that_all_read_every_shard_say_so",
    ),
    Mutation(
        "_streams/open_shards.py",
        "and info.id == 0 and not _said",
        "and info.id == 0",
        "tests/streams/test_shards.py::test_worker_processes_that_all_read_every_shard_say_so",
    ),
    Mutation(
        "_streams/retrying.py",
        "if tries and (run := running()) is not None:",
        "if False:",
        "tests/streams/test_read_ahead.py::test_a_connection_that_breaks_changes_no_draw",
    ),
]

_NOT_TESTED = re.compile(r"^E +((?:ImportError|ModuleNotFoundError|NameError|SyntaxError|IndentationError)\b.*)", re.MULTILINE)
_REASON = re.compile(r"^E +(.+)", re.MULTILINE)


def verdict(mutation: Mutation) -> tuple[str, str]:
    """What came of a mutation, and why."""
    with tempfile.TemporaryDirectory(prefix="penstock-mutation-") as folder:
        changed = mutation.applied((PACKAGE / mutation.file).read_text())
        if changed is None:
            return "STALE", f"the text does not occur exactly once in {mutation.file}"
        source = Path(folder) / "pipes"
        shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        (source / PACKAGE.name / mutation.file).write_text(changed)
        code, output = tested(source, [mutation.test])
    reason = next(iter(_REASON.findall(output)), output.strip().splitlines()[-1] if output.strip() else "")
    if code == 0:
        return "SURVIVED", ""
    if code != 1 or (found := _NOT_TESTED.search(output)):
        return "BROKEN", found[1] if code == 1 and found else reason
    return "killed", reason


def tested(source: Path, tests: list[str]) -> tuple[int, str]:
    """Run ``tests`` with the package in ``source``, in a fork of this process, which has imported torch already; pytest's exit status, and output."""
    assert "penstock" not in sys.modules, "the forks would have the package of this process"
    output = source.parent / "output.txt"
    pid = os.fork()
    if pid == 0:
        _run(source, tests, output)
    limit_s = LIMIT_S + 5 * len(tests)
    deadline = time.monotonic() + limit_s
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    if ended == (0, 0):
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 1, f"E no end after {limit_s} s"
    return os.waitstatus_to_exitcode(ended[1]), output.read_text()


def _run(source: Path, tests: list[str], output: Path) -> None:
    """The child: it never returns."""
    code = 70
    try:
        os.setsid()
        sink = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.close(sink)
        os.chdir(source.parent)
        os.environ |= {
            "PYTHONPATH": str(source),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(source.parent / "hypothesis"),
        }
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(source))
        import pytest

        options = [
            "-q",
            "--timeout=60",
            "-x",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(ROOT),
            "-c",
            str(ROOT / "pyproject.toml"),
        ]
        code = pytest.main([*options, *(str(ROOT / test) for test in tests)])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Plant faults in a copy of the package, and see that the tests catch them.")
    parser.add_argument("-k", metavar="WORD", default="", help="only mutations with this word in the file, the text or the test")
    parser.add_argument("--list", action="store_true", help="name them, and run nothing")
    chosen = parser.parse_args(arguments)
    mutations = [one for one in MUTATIONS if chosen.k in f"{one.file} {one.old} {one.new} {one.test}"]
    if chosen.list:
        print(*mutations, sep="\n")
        return 0
    importlib.import_module("torchdata.nodes")  # and torch: every test would import them, and so the forks have them already

    with tempfile.TemporaryDirectory(prefix="penstock-mutation-") as folder:
        source = Path(folder) / "pipes"
        shutil.copytree(PACKAGE, source / PACKAGE.name)
        code, output = tested(source, sorted({one.test for one in mutations}))
    if code != 0:
        print(output, "Without any mutation these tests fail already, so nothing can be learned from them.", sep="\n")
        return 1
    alive = 0
    for mutation in mutations:
        began = time.monotonic()
        what, why = verdict(mutation)
        alive += what != "killed"
        print(f"{what:9} {time.monotonic() - began:5.1f} s  {mutation}\n{'':18}{why[:150]}", flush=True)
    print(f"{len(mutations) - alive} of {len(mutations)} killed")
    return 1 if alive or not mutations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
