"""THE CONTRACT: every message between the services, its subject, its errors, its codec. No logic, no torch, no NATS.

    message            subject or bucket                 from → to                         kind
    -----------------  --------------------------------  --------------------------------  ----------------------------
    GenerateRequest    nj.v1.generate.<model>            client, gateway → tokenizer       request, queue group
    Accepted           (reply to GenerateRequest)        tokenizer → client, gateway       reply
    TokenizeRequest    nj.v1.tokenize.<model>            client, gateway → tokenizer       request, queue group
    TokenizeReply      (reply to TokenizeRequest)        tokenizer → client, gateway       reply
    DetokenizeRequest  nj.v1.detokenize.<model>          client, gateway → tokenizer       request, queue group
    DetokenizeReply    (reply to DetokenizeRequest)      tokenizer → client, gateway       reply
    WorkItem           nj.v1.work.<model>.<priority>     tokenizer → scheduler             JetStream NJ_WORK, work queue
    CacheCommand       nj.v1.cache.<model>               scheduler → cache_manager         request
    CacheReply         (reply to CacheCommand)           cache_manager → scheduler         reply
    StepPlan           nj.v1.exec.<executor>.plan        scheduler → executor              publish
    StepResult         nj.v1.exec.<executor>.result      executor → scheduler              publish
    TokenBatch         nj.v1.detok.<tokenizer>           scheduler → tokenizer             publish
    OutputFeedback     nj.v1.feedback.<scheduler>        tokenizer → scheduler             publish
    OutputChunk        nj.v1.out.<request>               tokenizer → output log            JetStream NJ_OUT, append
    OutputChunk        nj.v1.live.<request>              output log → gateway, any cli     republished by the server
    StoredResponse     nj.v1.response.<request>          gateway → any gateway             JetStream NJ_RESPONSES
    DeadLetter         nj.v1.dead.<request>              scheduler → operator              JetStream NJ_DLQ
    Cancel             nj.v1.cancel.<request>            anyone → scheduler                publish
    ControlRequest     nj.v1.control.<role>              operator → every instance         request, scattered
    ControlReply       (reply to ControlRequest)         every instance → operator         reply, one per instance
    KeepTrace          nj.v1.keep_trace                  every instance → every instance   publish
    SpanBatch          nj.v1.spans.<role>                every instance → console          publish
    MetricSample       nj.v1.samples.<role>              every instance → console, cli     publish
    TraceQuery         nj.v1.trace                       operator → console                request, queue group
    TraceReply         (reply to TraceQuery)             console → operator                reply
    Registration       KV nj_registry                    every instance → everyone         heartbeat, expires
    SchedulerLease     KV nj_lease                       scheduler → scheduler             compare-and-set, fencing
    HandedBack         KV nj_lease                       scheduler → scheduler             put, expires
    Pause              KV nj_lease                       scheduler → scheduler             put until resumed
    CacheOwnership     KV nj_lease                       cache_manager → cache_manager     compare-and-set, fencing
    EffectiveConfig    KV nj_config                      every instance → operator         put at start

An error travels as `ErrorReply` in place of any reply. `nj` is the deployment's prefix. Read on in generation.py,
tokenization.py, step.py, cache.py, output.py, control.py, responses.py, telemetry.py, errors.py; subjects.py holds
the names and codec.py the one encoding. openai.py, anthropic.py and responses.py hold the bodies of HTTP.
"""
