//! Requests for text: tokens, stopping, aborting, batches, log probabilities, methods.

use std::sync::Arc;

use chiasm_engine::wire::{EngineCoreRequest, FinishReason, SamplingParams, StopReason, Value};
use chiasm_types::TokenId;

use crate::frontend::{EOS, Frontend, greedy, text_request, tokens};

const PLAIN: &str = "no images; 0 of 40 prompt tokens were cached";

fn with(id: &str, change: impl FnOnce(&mut SamplingParams)) -> EngineCoreRequest {
    // Each request has its own prompt, so that none finds anything in the cache.
    let family = id.bytes().fold(1, |hash, byte| (hash * 31 + u32::from(byte)) % 1000);
    let mut request = text_request(id, tokens(family, 40));
    change(&mut request.sampling_params);
    request
}

#[tokio::test]
async fn answer_is_text_followed_by_eos() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    let answer = frontend.run(&with("a", |_| {})).await;
    assert_eq!(answer.text(), PLAIN);
    assert_eq!(answer.tokens.last(), Some(&EOS));
    let last = answer.outputs.last().unwrap();
    assert_eq!((last.finish_reason, &last.stop_reason), (Some(FinishReason::Stop), &None));
    let stats = answer.outputs[0].prefill_stats.as_ref().unwrap();
    assert_eq!(
        (stats.num_prompt_tokens, stats.num_computed_tokens, stats.num_cached_tokens),
        (40, 40, 0)
    );
    assert_eq!(stats.num_cache_creation_tokens, 32);
    assert_eq!(answer.outputs[0].events.iter().map(|event| event.kind).collect::<Vec<_>>(), [1, 2]);
    assert!(
        answer.outputs[1..]
            .iter()
            .all(|output| output.prefill_stats.is_none() && output.events.is_empty())
    );
}

#[tokio::test]
async fn generated_tokens_are_cached() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    let first = frontend.run(&with("a", |_| {})).await;
    // The next turn: prompt, answer without EOS, new question.
    let mut next = with("a", |_| {});
    next.request_id = "b".into();
    Arc::make_mut(&mut next.prompt_token_ids).extend(&first.tokens[..first.tokens.len() - 1]);
    let computed = next.prompt_token_ids.len();
    Arc::make_mut(&mut next.prompt_token_ids).extend(tokens(900, 50));
    let second = frontend.run(&next).await;
    assert_eq!(second.cached() as usize, computed / 32 * 32);
}

#[tokio::test]
async fn stop_conditions_end_generation() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    let blank = TokenId(u32::from(b' '));
    let requests = [
        with("length", |params| params.max_tokens = 5),
        with("token", |params| params.stop_token_ids = vec![blank]),
        with("ignores", |params| {
            params.eos_token_id = None;
            params.max_tokens = PLAIN.len() as u32 + 5;
        }),
        with("at least", |params| {
            params.min_tokens = PLAIN.len() as u32 + 5;
            params.max_tokens = 500;
        }),
        with("not yet", |params| {
            params.stop_token_ids = vec![blank];
            params.all_stop_token_ids = vec![blank, EOS];
            params.min_tokens = 4;
        }),
    ];
    for request in &requests {
        frontend.add(request).await;
    }
    let answers = frontend.answers(requests.len()).await;
    let ending = |id: &str| {
        (
            answers[id].text(),
            answers[id].finish,
            answers[id].outputs.last().unwrap().stop_reason.clone(),
        )
    };

    assert_eq!(ending("length"), ("no im".into(), Some(FinishReason::Length), None));
    assert_eq!(
        ending("token"),
        ("no ".into(), Some(FinishReason::Stop), Some(StopReason::Token(blank)))
    );
    assert_eq!(ending("ignores"), (format!("{PLAIN}no i"), Some(FinishReason::Length), None));
    // EOS was suppressed once, so the text starts again and ends at the second EOS.
    assert_eq!(ending("at least"), (format!("{PLAIN}{PLAIN}"), Some(FinishReason::Stop), None));
    // The first blank came before `min_tokens`.
    assert_eq!(
        ending("not yet"),
        ("noimages; ".into(), Some(FinishReason::Stop), Some(StopReason::Token(blank)))
    );
}

#[tokio::test]
async fn concurrent_requests_share_messages() {
    let (mut frontend, _engine) = Frontend::engine(|config| {
        // Slow enough for all requests to arrive during the first step.
        config.pace.speedup = 1.0;
        config.pace.decode_tokens_per_s = 50.0;
    })
    .await;
    for id in ["a", "b", "c"] {
        frontend.add(&with(id, |params| params.max_tokens = 20)).await;
    }
    let mut largest = 0;
    let mut finished = 0;
    while finished < 3 {
        let message = frontend.outputs().await;
        let stats = message.scheduler_stats.expect("stats in every step");
        largest = largest.max(message.outputs.len());
        finished += message.outputs.iter().filter(|output| output.finish_reason.is_some()).count();
        assert_eq!(stats.num_running_reqs + stats.num_waiting_reqs, 3 - finished as u64);
        assert_eq!(message.weight_version.as_deref(), Some("default"));
    }
    assert_eq!(largest, 3);
    // vLLM takes one more step after the last request has ended.
    let idle = frontend.outputs().await;
    assert!(idle.outputs.is_empty());
    assert_eq!(idle.scheduler_stats.unwrap().kv_cache_usage, 0.0);
}

#[tokio::test]
async fn aborted_request_has_no_more_outputs() {
    let (mut frontend, _engine) = Frontend::engine(|config| {
        config.pace.speedup = 1.0;
        config.pace.decode_tokens_per_s = 200.0;
    })
    .await;
    let endless = with("a", |params| {
        params.max_tokens = 100_000;
        params.eos_token_id = None;
    });
    frontend.add(&endless).await;
    assert_eq!(frontend.outputs().await.outputs.len(), 1);
    frontend.abort(&["a", "unknown"]).await;
    while !frontend.outputs().await.outputs.is_empty() {}
    // The id is free again.
    let answer = frontend.run(&with("a", |params| params.max_tokens = 3)).await;
    assert_eq!(answer.finish, Some(FinishReason::Length));
    assert_eq!(answer.cached(), 32);
}

#[tokio::test]
async fn log_probabilities_have_vllms_shapes() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    let request = with("a", |params| {
        params.max_tokens = 2;
        params.logprobs = Some(100);
        params.prompt_logprobs = Some(30);
    });
    frontend.run(&with("warm", |_| {})).await;
    let answer = frontend.run(&request).await;
    for (output, token) in answer.outputs.iter().zip(&answer.tokens) {
        let logprobs = output.new_logprobs.as_ref().unwrap();
        assert_eq!((logprobs.len(), logprobs.width), (1, 101));
        assert_eq!(logprobs.token_ids[0], *token);
    }
    let prompt = answer.outputs[0].prompt_logprobs.as_ref().unwrap();
    assert_eq!((prompt.len(), prompt.width), (39, 31));
    assert_eq!(answer.outputs[1].prompt_logprobs, None);
    // Prompt log probabilities need every token computed.
    assert_eq!(frontend.run(&request).await.cached(), 0);
}

#[tokio::test]
async fn methods_answer_as_captured() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    for (method, args, expected) in [
        ("reset_mm_cache", vec![], Ok(Value::Nil)),
        ("reset_prefix_cache", vec![Value::from(false), Value::from(false)], Ok(Value::from(true))),
        ("reset_prefix_cache", vec![], Ok(Value::from(true))),
        ("reset_encoder_cache", vec![], Ok(Value::Nil)),
        ("get_supported_tasks", vec![], Ok(Value::Array(vec![Value::from("generate")]))),
        ("is_scheduler_paused", vec![], Ok(Value::from(false))),
        (
            "nope",
            vec![],
            Err("Call to nope method failed: 'EngineCoreProc' object has no attribute 'nope'"
                .to_owned()),
        ),
    ] {
        assert_eq!(frontend.call(method, args).await, expected, "{method}");
    }
}

#[tokio::test]
async fn prefix_cache_reset_can_preempt_requests() {
    let (mut frontend, _engine) = Frontend::engine(|config| {
        config.pace.speedup = 1.0;
        config.pace.decode_tokens_per_s = 500.0;
    })
    .await;
    let mut request = with("a", |params| *params = greedy(60));
    request.sampling_params.eos_token_id = None;
    frontend.add(&request).await;
    let mut received = frontend.outputs().await.outputs.len();
    assert_eq!(
        frontend.call("reset_prefix_cache", vec![]).await,
        Ok(Value::from(false)),
        "blocks are in use"
    );
    assert_eq!(
        frontend.call("reset_prefix_cache", vec![Value::from(true)]).await,
        Ok(Value::from(true))
    );
    // The request starts over and continues after its last token.
    loop {
        let outputs = frontend.outputs().await.outputs;
        received += outputs.len();
        if outputs.iter().any(|output| output.finish_reason == Some(FinishReason::Length)) {
            break;
        }
    }
    assert!(received <= 60, "some outputs arrived while the calls were answered");
    let answer = frontend.run(&with("a", |params| params.max_tokens = 1)).await;
    assert_eq!(answer.cached(), 32);
}
