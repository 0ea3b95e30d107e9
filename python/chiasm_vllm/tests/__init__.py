"""Run from the repository's root with the Python of an environment that has vLLM:

python -m unittest discover -s python/chiasm_vllm/tests -t python/chiasm_vllm
"""
