"""Chat through LangChain, which finds the server as the openai client does.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=... python langchain_chat.py
"""

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Module(BaseModel):
    name: str = Field(max_length=20)  # without a limit a model may write a name that never ends
    is_in_standard_library: bool


model = ChatOpenAI(model="pyhelp", max_completion_tokens=200)
for chunk in model.stream("What does json.dumps do?"):
    print(chunk.content, end="", flush=True)
print()
print(model.with_structured_output(Module, method="json_schema").invoke("Which module has dumps?"))
