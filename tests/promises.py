"""One path for each promise, through real servers, workers and files: what `make test` runs.

`make test` is for whoever has just cloned this: all unit tests, and for each promise of the README
and each kind of limits in docs/security.md something that would hurt a user if it broke.
`make test-all` runs everything there is.
`python -m tests.promises` prints the list as arguments of pytest, `python -m tests.promises rest`
those by which pytest runs everything else.
"""

from __future__ import annotations

import sys

ALL: tuple[str, ...] = ("",)

PATHS: dict[str, dict[str, tuple[str, ...]]] = {
    "nobody pays for another": {
        "integration/test_loop_unburdened.py": (
            "test_what_takes_longer_to_decode_is_refused_and_its_setting_named[POST-/v1/chat/completions]",
        ),
        "integration/test_names_deleted.py": (
            "test_what_one_name_is_deleted_of_no_other_name_misses",
        ),
        "integration/test_http_tenants.py": (
            "test_a_session_of_the_same_name_is_another_conversation",
            "test_who_asks_for_little_waits_for_no_crowd_of_another",
        ),
        "integration/test_kv_deleted.py": ("test_what_others_say_as_well_is_theirs",),
        "integration/test_intake_bounded.py": (
            "test_what_takes_too_much_is_refused_and_others_are_answered_meanwhile[schema]",
        ),
        "integration/test_streams_survive.py": ("test_neighbours_go_on_as_well",),
        "integration/test_supervision.py": (
            "test_only_what_a_worker_computed_for_is_blamed_for_its_end",
        ),
        "integration/test_swap.py": (
            "test_a_conversation_goes_on_where_it_was_when_its_model_comes_back",
        ),
        "integration/test_two_names.py": (
            "test_both_names_have_one_process_which_each_asks_in_its_own_way",
        ),
    },
    "warm before it is asked": {
        "integration/test_http_litellm.py": (
            "test_each_of_three_turns_goes_on_from_the_one_before[chat]",
            "test_each_of_three_turns_goes_on_from_the_one_before[messages]",
        ),
        "integration/test_prewarm.py": (
            "test_a_text_a_file_and_a_table_with_tools_are_warm_for_their_first_request",
        ),
        "integration/test_cache_diagnostics.py": (
            "test_a_response_that_goes_on_is_a_hit_and_a_deleted_one_is_not_found",
        ),
        "integration/test_client_tools.py": (
            "test_a_tool_that_the_client_runs_is_called_by_its_own_item_and_answered[shell]",
            "test_the_vendors_client_reads_such_a_call_as_it_is_written[shell]",
        ),
        "integration/test_tool_changes.py": (
            "test_a_tool_that_is_removed_cannot_be_called_until_it_is_added_again",
        ),
        "integration/test_conversations_stored.py": (
            "test_each_response_goes_on_from_all_that_was_said_and_adds_to_it",
            "test_an_item_that_only_a_conversation_has_can_be_referred_to_by_its_owner",
        ),
        "integration/test_compaction.py": (
            "test_a_compaction_reads_what_is_new_and_the_turn_after_it_what_the_client_adds",
        ),
        "integration/test_interrupted.py": ("test_an_answer_that_its_client_left_is_reused[150]",),
    },
    "never wrong": {
        "contract/test_orphan_thoughts.py": (
            "test_a_stream_begins_in_reasoning_where_the_model_is_known_to_think[qwen3-wish0]",
        ),
        "integration/test_vllm_formats.py": (
            "test_an_answer_has_the_form_that_any_of_vllms_fields_says[grammar-of-GBNF]",
        ),
        "integration/test_chat_templates.py": (
            "test_a_template_that_loops_over_parts_shows_what_came_as_a_string",
        ),
        "integration/test_streamed_lines.py": (
            "test_what_a_client_reads_line_by_line_is_whole[/v1/chat/completions]",
        ),
        "contract/test_speculation.py": (
            "test_rows_with_and_without_proposals_say_what_they_say_alone[qwen3]",
            "test_a_draft_model_that_is_always_right_is_accepted[qwen3]",
        ),
        "crash/test_damaged_files.py": (
            "test_every_truncation_is_a_miss_and_makes_way",
            "test_swapped_files_are_misses",
        ),
        "integration/test_kv_blocks_kept.py": (
            "test_a_damaged_slot_costs_its_block_and_is_written_again",
        ),
        "integration/test_idle_caches.py": (
            "test_what_is_deleted_leaves_its_caches_too_and_nobody_elses",
        ),
        "integration/test_swap.py": (
            "test_weights_that_change_under_a_loaded_model_are_not_taken_for_the_old_ones",
        ),
        "integration/test_preparing.py": (
            "test_what_was_changed_after_it_was_prepared_is_read_again[weights]",
        ),
        # Of the kinds of models the one that mixes attention with layers that cannot be cut.
        "integration/test_hot_tier.py": tuple(
            f"{name}[qwen3_5]"
            for name in (
                "test_each_turn_computes_only_what_is_new_and_says_the_same_as_without",
                "test_an_edit_reuses_what_is_before_it_where_the_layers_can_be_cut",
                "test_siblings_at_the_same_moment_compute_the_system_prompt_once",
                "test_choices_share_their_prompt_and_are_kept_each",
                "test_an_answer_that_ends_at_a_stop_string_is_gone_on_from",
                "test_different_conversations_at_once_do_not_mix",
                "test_prefix_mode_keeps_the_system_prompt_only",
            )
        ),
    },
    "durable": {
        "integration/test_conversations_interleaved.py": (
            "test_what_clients_say_and_delete_at_once_is_kept_and_gone_whatever_is_killed",
        ),
        "integration/test_kv_restart.py": (
            "test_a_short_conversation_goes_on_after_its_server_was_killed",
            "test_what_is_said_to_be_durable_is_there_after_a_kill",
        ),
        "integration/test_store_killed.py": (
            "test_nothing_acknowledged_is_lost_when_the_writer_is_killed",
        ),
        "integration/test_http_responses.py": ("test_a_stored_conversation_survives_a_kill",),
        "integration/test_message_threads.py": (
            "test_a_continued_turn_reads_all_that_was_said_with_system_and_tools",
            "test_deleting_a_session_deletes_the_text_that_is_kept_of_it[thread]",
        ),
        "integration/test_request_fields.py": (
            "test_the_page_has_every_field_of_the_types_and_no_other",
            "test_what_the_page_says_of_a_field_is_what_happens[/v1/completions]",
        ),
    },
    "optional": {
        "integration/test_kv_store.py": (
            "test_the_directory_is_deleted_while_it_is_used",
            "test_a_full_disk_degrades_the_cache_and_nothing_else",
            "test_a_lost_index_is_rebuilt_from_the_files",
        ),
        "integration/test_late_store.py": (
            "test_a_store_that_comes_late_gets_what_is_in_memory_and_nobody_is_replaced",
        ),
    },
    "bounded": {
        "integration/test_kv_store.py": ("test_the_cap_counts_everything_over_all_models",),
        "integration/test_bounded_connections.py": (
            "test_however_many_connect_what_they_hold_is_bounded_and_others_are_served",
        ),
    },
    "private": {
        "integration/test_deletion_interleaved.py": ALL,
        "integration/test_chains_deleted.py": (
            "test_one_that_a_session_goes_on_from_is_deleted_and_the_session_keeps_all",
            "test_what_another_tenant_was_told_alike_stays_its",
        ),
        "integration/test_prefixes_deleted.py": (
            "test_a_system_prompt_goes_with_all_that_said_it[session]",
        ),
        "integration/test_kv_restart.py": (
            "test_nothing_of_a_short_conversation_is_said_where_it_is_kept",
        ),
        "integration/test_http_tenants.py": (
            "test_a_prompt_of_one_is_new_when_another_sends_it[300]",
        ),
        "integration/test_http_security.py": (
            "test_without_a_key_nothing_but_liveness_is_told",
            "test_a_key_opens_the_protocols_but_not_the_administration",
            "test_no_spelling_of_a_path_leads_around_the_admin_key",
            "test_every_file_of_the_dashboard_needs_the_admin_key",
            "test_signing_in_takes_a_form_of_our_own_page",
            "test_keys_are_neither_in_the_log_nor_in_the_answers",
            "test_other_names_and_other_sites_are_refused_even_with_a_key",
            "test_a_browser_that_asks_first_gets_no_leave",
            "test_one_request_is_not_two",
            "test_a_head_is_bounded_and_has_one_reading_before_any_key_is_asked_for",
            "test_who_is_refused_cannot_go_on_sending[/nowhere]",
            "test_a_prompt_is_held_to_the_tokens_of_its_route",
            "test_an_answer_is_held_to_the_tokens_of_its_route",
            "test_bodies_are_held_to_the_bytes_and_levels_of_their_route",
            "test_guessing_closes_the_door_to_unknown_keys",
            "test_what_takes_longer_than_its_route_may_is_ended_in_the_words_of_the_protocol",
            "test_a_client_that_stops_in_its_body_is_told_so_and_cut_off",
            "test_a_server_for_other_machines_does_not_start_without_keys",
        ),
        "integration/test_keys_asked_for.py": (
            "test_the_table_has_a_row_for_all_settings_and_an_area_for_every_route",
            "test_a_cell_is_what_a_server_does[several-in-api_keys-no-key-admin-401]",
            "test_a_cell_is_what_a_server_does[several-in-api_keys-a-tenant-s-key-API-yes]",
            "test_a_cell_is_what_a_server_does[several-in-api_keys-a-tenant-s-key-admin-403]",
        ),
        "integration/test_store_ownership.py": (
            "test_a_second_server_on_a_home_changes_nothing_in_it",
        ),
        "integration/test_kept_tools.py": (
            "test_another_thread_that_says_the_same_has_no_tools_and_is_told_why",
            "test_codex_compaction_near_the_full_window_is_computed_from_its_own_words_on[small]",
        ),
        "crash/test_hostile_machine.py": ("test_a_home_that_is_made_is_its_owners_alone",),
        "crash/test_innocent_models.py": (
            "test_too_few_files_are_said_of_the_machine_and_not_of_the_model",
        ),
        "browser/test_sign_in.py": (
            "test_signing_out_ends_the_session_for_whoever_has_its_cookie",
        ),
    },
    "nothing of others is run": {
        "contract/test_foreign_code.py": ("test_what_the_attack_asked_for_is_not_run",),
        "integration/test_fetch.py": (
            "test_a_name_that_changes_its_address_is_asked_once_and_leads_nowhere_else",
        ),
    },
    "never silent": {
        "integration/test_damaged_histories.py": (
            "test_half_a_character_and_broken_arguments_are_read_and_told",
            "test_a_damaged_past_is_answered_and_what_is_whole_of_it_is_read_and_reused[messages]",
        ),
        "integration/test_history_database.py": (
            "test_what_was_set_aside_is_said_until_it_is_acknowledged_and_goes_long_after",
        ),
        "integration/test_http_cache.py": ALL,
        "integration/test_cut_short.py": (
            "test_without_a_deadline_every_protocol_answers_whole[/v1/chat/completions]",
        ),
        "integration/test_supervision.py": (
            "test_a_killed_worker_is_replaced_and_its_requests_go_on",
            "test_three_crashes_in_a_row_open_the_breaker_until_somebody_restarts",
        ),
    },
    "protocols and commands": {
        "integration/test_model_defaults.py": (
            "test_a_template_has_its_models_arguments_and_a_request_has_the_last_word",
            "test_an_agents_id_names_a_chats_conversation",
            "test_an_agent_is_spelled_in_one_way_everywhere",
            "test_health_tells_what_readiness_does",
            "test_a_clock_that_makes_thoughts_unknown_is_told_of",
        ),
        "contract/test_openai_sdk.py": (
            "test_a_chat_answer_has_everything_a_client_reads",
            "test_usage_counts_are_the_tokenizers_own",
            "test_streamed_text_joined_is_the_text_that_is_not_streamed[0]",
            "test_a_stream_begins_with_the_role_and_ends_with_one_reason_for_each_choice",
            "test_logprobs_belong_to_the_text_and_stay_in_order",
            "test_a_conversation_as_agents_send_it_is_accepted",
            "test_a_text_is_continued_and_echoed_on_request",
            "test_models_are_listed_and_found_by_name_and_alias",
            "test_what_cannot_be_served_is_a_bad_request_that_names_its_field",
            "test_a_prompt_beyond_the_context_has_the_code_that_agents_compact_on",
        ),
        "contract/test_anthropic_sdk.py": (
            "test_a_message_has_everything_a_client_reads",
            "test_the_streaming_helper_puts_together_what_the_whole_answer_says",
            "test_raw_events_are_typed_from_the_first_to_the_last",
            "test_a_tool_round_trip_ends_with_the_tools_result",
            "test_thoughts_are_a_block_of_their_own_that_is_signed",
            "test_a_count_is_the_usage_of_the_same_request",
            "test_what_cannot_be_served_is_a_bad_request",
            "test_a_prompt_that_is_too_long_is_told_as_clients_compact_on",
            "test_a_conversation_is_compacted_into_one_block_and_gone_on_with[False]",
        ),
        "integration/test_http_agents.py": (
            "test_each_turn_computes_its_new_tokens_only",
            "test_the_history_is_what_was_sent_and_answered_in_order",
            "test_a_streamed_turn_is_kept_as_it_was_streamed",
            "test_an_agent_is_made_shown_listed_changed_and_deleted",
            "test_a_client_that_missed_a_turn_is_told_both_numbers",
            "test_a_fork_goes_its_own_way_from_the_turn_it_was_made_at",
            "test_deleting_an_agent_leaves_no_byte_of_what_was_said",
        ),
        "integration/test_cli.py": (
            "test_status_says_where_the_server_is_and_what_it_has_loaded",
            "test_a_model_is_pinned_unloaded_and_loaded_by_name",
            "test_a_conversation_shows_what_each_turn_reused",
            "test_one_message_is_answered_and_can_be_had_as_json",
            "test_an_answer_that_is_stopped_leaves_the_conversation_usable",
            "test_the_settings_in_force_are_shown_without_their_secrets",
            "test_a_prompt_is_warm_when_the_command_returns",
            "test_without_a_server_every_command_says_so",
            "test_what_needs_no_server_works_without_one",
        ),
    },
}
"""By promise and file: the names of the tests, some with one of their parameters, or all."""


def arguments() -> list[str]:
    """Each file, or each test in one, once, from the root of the repository."""
    return [
        f"tests/{file}::{name}" if name else f"tests/{file}"
        for files in PATHS.values()
        for file, names in files.items()
        for name in names
    ]


def others() -> list[str]:
    """All tests but those and the unit tests."""
    chosen = (("--deselect", one) if "::" in one else ("--ignore", one) for one in arguments())
    return ["tests", "--ignore", "tests/unit", *(word for words in chosen for word in words)]


if __name__ == "__main__":
    sys.stdout.write(" ".join(others() if sys.argv[1:] == ["rest"] else arguments()))
