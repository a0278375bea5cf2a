"""Chat through the openai client, which finds the server by two variables:

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=... python openai_chat.py
"""

from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": "What does json.dumps do?"}]
with client.chat.completions.stream(model="pyhelp", messages=messages) as stream:
    for event in stream:
        if event.type == "content.delta":
            print(event.delta, end="", flush=True)
print()
print(stream.get_final_completion().usage)
