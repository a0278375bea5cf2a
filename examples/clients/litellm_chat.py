"""Chat through litellm, which many gateways are built on.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=... python litellm_chat.py
"""

import litellm

answer = litellm.completion(
    model="openai/pyhelp",
    messages=[{"role": "user", "content": "What does json.dumps do?"}],
    stream=True,
)
for chunk in answer:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
