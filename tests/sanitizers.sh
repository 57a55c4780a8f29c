#!/usr/bin/env bash
# Which test binaries run under which sanitizer in tests/run.sh: `sanitizers.sh asan` or `sanitizers.sh tsan` lists them.
# asan (with UBSan): whatever reads bytes from outside, and the engine from a prompt to its tokens. tsan: whatever has
# threads of its own. Left out is what adds no such code, and what would take minutes: the kernels' accuracy, the
# families' logits, the tokenizer's 10,000 lines, the tests that fork, and for tsan gRPC, whose library is not instrumented: what it
# does under its own locks to objects of its templates in our program looks like races.
set -euo pipefail
case "${1:-}" in
  asan)
    echo safetensors_test model_config_test latent_config_test deepseek_v41_test vocabulary_test checkpoint_test weights_test stored_weights_test
    echo state_store_test snapshots_test                                           # files of states
    echo tokenizer_test chat_template_test chat_template_limits_test reply_parser_test reply_corpus_test profile_test
    echo wire_plan_test wire_report_test join_test                                 # between ranks
    echo api_test http_protocol_test http_replies_test                             # from clients
    echo engine_test pass_runner_test exchange_sum_test rank_loop_test slots_test
    echo dflash_test dspark_test engine_dflash_test                                # block drafters
    ;;
  tsan)
    echo transport_local_test transport_ucx_threads_test exchange_sum_test rank_loop_test cluster_runs_test
    echo engine_test round_planner_test admission_test state_store_test worker_pool_test   # the scheduler and its helpers
    echo cluster_join_test cluster_loss_test http_load_test
    ;;
  *) echo "usage: $0 asan|tsan" >&2; exit 2 ;;
esac | tr ' ' '\n'
