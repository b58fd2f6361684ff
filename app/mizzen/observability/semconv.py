"""Names of OpenTelemetry's semantic conventions, as our own constants.

The GenAI ones are those of semantic-conventions-genai v0.1.0 (the repository they moved to; status: development), the
others of semantic-conventions v1.44.0 (stable). The Python package marks its own GenAI names as deprecated.
"""

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

# ---- GenAI: attributes ----
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"  # an int since v0.1.0
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_STOP_SEQUENCES = "gen_ai.request.stop_sequences"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"  # only if it is not 1
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"  # only if the answer is streamed
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
INPUT_MESSAGES = "gen_ai.input.messages"  # opt-in
OUTPUT_MESSAGES = "gen_ai.output.messages"  # opt-in

PROVIDER = "mizzen"  # a custom value, as the convention allows where none of its own applies

# ---- GenAI: metrics, with the boundaries that the convention recommends ----
REQUEST_DURATION = "gen_ai.server.request.duration"
REQUEST_DURATION_BOUNDARIES = tuple(0.01 * 2**k for k in range(14))
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
TIME_TO_FIRST_TOKEN_BOUNDARIES = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
TIME_PER_OUTPUT_TOKEN_BOUNDARIES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

# ---- HTTP and errors ----
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
HTTP_ROUTE = "http.route"
URL_PATH = "url.path"
URL_SCHEME = "url.scheme"
ERROR_TYPE = "error.type"

# ---- ours ----
REQUEST_ID = "mizzen.request.id"  # x-request-id
CHOICE_INDEX = "mizzen.choice.index"
