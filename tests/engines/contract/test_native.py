"""The native engine keeps the contract of `RolloutEngine`."""

from __future__ import annotations

from tests.engines.contract.harness_native import NativeHarness
from tests.engines.contract.suite import Contract
from tests.engines.contract.updating import Updating


class TestNative(Contract):
    harness = NativeHarness()
    slow = frozenset(
        {
            # Held by a quick test of `tests/engines/rollout`, too.
            "test_neither_slots_nor_the_replica_change_an_answer",
            "test_the_time_of_arrival_changes_no_answer",
            "test_order_and_company_change_no_answer",
            "test_an_answer_is_the_same_whether_others_to_its_prompt_come_with_it_or_not",
            "test_without_its_weights_it_goes_on_only_with_new_ones",
            "test_a_transfer_that_fails_half_way_leaves_the_old_version_served_and_nothing_staged",
            "test_it_is_not_put_to_sleep_while_it_decodes",
            "test_only_what_is_staged_can_be_activated",
            "test_after_an_interrupt_nothing_of_the_old_versions_cache_is_left",
            "test_what_is_kept_goes_on_with_the_old_keys_and_values",
            "test_after_keeping_new_calls_share_nothing_with_the_old_version",
            "test_answers_that_outgrow_memory_are_parked_and_go_on",
            "test_finding_a_context_changes_no_answer",
            "test_an_interrupt_counts_the_answers_that_it_cut",
            "test_one_call_of_a_prompt_is_aborted_and_the_others_go_on",
            "test_an_aborted_answer_counts_the_versions_of_its_tokens_alone",
            "test_aborted_calls_are_yielded_as_they_are_and_all_others_finish",
            "test_numbers_that_are_unknown_finished_or_anothers_are_ignored",
            "test_training_calls_with_a_token_of_an_older_version_are_overdue_and_no_others",
            "test_leaving_drops_what_was_not_yielded_and_nothing_of_other_clients",
            "test_a_number_that_is_in_use_is_refused_and_harms_nobody",
            "test_a_clients_results_are_read_by_one",
            "test_a_drain_finishes_what_was_submitted_and_starts_nothing_that_came_later",
            "test_an_interrupt_ends_a_drain_that_is_under_way",
            "test_calls_start_in_order_and_are_yielded_when_they_are_done",
            "test_asleep_it_takes_calls_and_weights_and_loses_nothing[interrupt]",
            "test_asleep_it_takes_calls_and_weights_and_loses_nothing[keep]",
            "test_validation_starts_before_training_that_waits",
            # Left to the simulated engine; random commands remain.
            "test_thousands_of_calls_at_random_times_are_each_answered_once",
            # One case of several that take one way.
            "test_every_answer_comes_to_its_end_over_many_pauses[drain]",
            "test_every_answer_comes_to_its_end_over_many_pauses[keep]",
            "test_each_version_is_stamped_on_just_the_tokens_that_were_sampled_under_it[interrupt]",
            "test_a_version_that_nothing_was_sampled_under_is_nobodys[keep]",
            "test_further_calls_share_nothing_with_the_version_before[drain]",
            "test_an_abort_reaches_what_is_paused_and_what_waits_for_the_end_of_the_pause[interrupt]",
            "test_an_abort_reaches_what_is_paused_and_what_waits_for_the_end_of_the_pause[keep]",
            "test_leaving_while_paused_frees_everything[keep]",
            "test_a_context_of_any_length_that_leaves_room_is_continued[2]",
            "test_a_context_of_any_length_that_leaves_room_is_continued[190]",
            # Held by a quick test of `TestNativeInPlace`, too.
            "test_a_drain_leaves_one_version_in_each_answer",
            "test_a_finished_answer_does_not_count_the_version_that_came_before_it_was_taken",
        }
    )


class TestNativeInPlace(Updating):
    """New weights are written over those that are served."""

    harness = NativeHarness(dual_buffer=False)
    slow = frozenset(
        {
            # Held by a quick test of `tests/engines/rollout`, too.
            "test_in_place_weights_are_refused_while_it_decodes",
            # Versions are stamped alike in both ways.
            "test_each_version_is_stamped_on_just_the_tokens_that_were_sampled_under_it[interrupt]",
            "test_each_version_is_stamped_on_just_the_tokens_that_were_sampled_under_it[keep]",
            "test_a_version_that_nothing_was_sampled_under_is_nobodys[interrupt]",
            "test_a_version_that_nothing_was_sampled_under_is_nobodys[keep]",
        }
    )
