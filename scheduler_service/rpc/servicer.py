"""InferenceService over gRPC: messages to values and back. What happens is in engine/."""

from contextlib import aclosing
from typing import Any

import grpc

from scheduler_service.engine.models import Models
from scheduler_service.rpc.convert import generate_input, generate_response, model_message, prompt_of
from stepwire.v1 import inference_pb2, inference_pb2_grpc

TENANT_KEY = "stepwire-tenant"
SERVICE_NAME = "stepwire.v1.InferenceService"

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """All RPCs of inference.proto. Errors are raised as StepwireError."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def Generate(  # type: ignore[override]  # writes what the base class would have it yield
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> None:
        """See inference.proto. A call that ends early closes the generator, which frees the request.

        It writes each message itself: there is one for every token, and yielding it costs another coroutine switch.
        """
        call = generate_input(request, context.time_remaining(), _tenant(context))
        write = context.write
        async with aclosing(self._models.route(call.model).generate(call)) as events:
            async for event in events:
                await write(generate_response(event))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, _context: _Context
    ) -> inference_pb2.TokenizeResponse:
        """See inference.proto."""
        engine = self._models.get(request.model)
        return inference_pb2.TokenizeResponse(token_ids=await engine.tokenize(prompt_of(request)))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, _context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        """See inference.proto."""
        engine = self._models.get(request.model)
        text = await engine.detokenize(request.token_ids, keep_special_tokens=request.keep_special_tokens)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, _request: inference_pb2.ListModelsRequest, _context: _Context
    ) -> inference_pb2.ListModelsResponse:
        """See inference.proto."""
        return inference_pb2.ListModelsResponse(models=map(model_message, self._models.infos()))

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, _context: _Context
    ) -> inference_pb2.GetModelResponse:
        """See inference.proto."""
        return inference_pb2.GetModelResponse(model=model_message(self._models.get(request.model).model_info()))


def _tenant(context: _Context) -> str:
    """Who calls, by the call's metadata; empty when it does not say."""
    for key, value in context.invocation_metadata() or ():
        if key == TENANT_KEY:
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""
