"""SGLang and vLLM: start a server, drive it with this project's prompts, read and compare what it does.

The engines live in environments of their own and are reached over HTTP; nothing here imports them.
"""
