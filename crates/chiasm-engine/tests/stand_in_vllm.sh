#!/bin/sh
# Stands in for vllm in tests of the launcher: `serve <behaviour> <flags…>`.
case "$2" in
  fails) echo "INFO starting"; echo "ERROR no such model" >&2; exit 3 ;;
  prints_settings) echo "gpus=$CUDA_VISIBLE_DEVICES extra=$STAND_IN_EXTRA last=$(eval echo "\${$#}")" ;;
  obeys) trap 'echo "tidied up"; exit 0' TERM; sleep 1000 & echo ready; wait ;;
  resists) trap '' TERM; echo ready; while :; do sleep 1; done ;;
  leaves_a_child) sh -c "trap '' TERM; while :; do sleep 1; done" & exit 0 ;;
  *) echo "unknown behaviour $2" >&2; exit 64 ;;
esac
