//! Handling of a server's answers.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use chiasm_backend::{Content, Finish, JobError, Sampling};
use chiasm_types::TokenId;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::stand_in::{Answer, Server, event, events, length, picture_event, server_info, tokens};
use crate::support::{DropSignal, SOON, job, run, sampling, with_picture};

#[tokio::test]
async fn unexpected_prompt_is_distrusted() {
    for (count, prompt, is_trusted) in [
        (5, json!([1, 9, 9, 9, 2]), true),
        (5, Value::Null, true),
        (4, Value::Null, false),
        (3, json!([1, 9, 2]), false),
        (5, json!([1, 9, 9, 8, 2]), false),
    ] {
        let server = Server::with(move || events(&[picture_event(count, prompt.clone())])).await;
        let backend = server.connect().await.unwrap();
        let (_, error) = run(&*backend, with_picture("{}", sampling())).await;
        assert!(error.is_none(), "the job is served nevertheless: {error:?}");
        let distrusted = timeout(Duration::from_millis(50), backend.distrusted()).await;
        assert_eq!(distrusted.is_err(), is_trusted, "{distrusted:?}");
    }
}

#[tokio::test]
async fn full_prompt_is_requested_only_sometimes() {
    let server = Server::with(|| events(&[picture_event(5, Value::Null)])).await;
    let backend = server.connect().await.unwrap();
    for _ in 0..40 {
        run(&*backend, with_picture("{}", sampling())).await;
    }
    let requested: Vec<bool> = server
        .requests()
        .iter()
        .map(|body| body.get("return_prompt_token_ids").is_some())
        .collect();
    assert!(requested[..16].iter().all(|requested| *requested), "the first ones");
    let later = requested[16..].iter().filter(|requested| **requested).count();
    assert_eq!(later, 2, "and some later ones");
}

#[tokio::test]
async fn cumulative_or_incremental_events_are_equivalent() {
    let cumulative = [
        event(&[5], 1, Value::Null),
        event(&[5, 6, 7], 3, Value::Null),
        event(&[5, 6, 7, 8], 4, length()),
    ];
    let incremental =
        [event(&[5], 1, Value::Null), event(&[6, 7], 3, Value::Null), event(&[8], 4, length())];
    for sent in [cumulative, incremental] {
        let server = Server::with(move || events(&sent)).await;
        let (outputs, error) = server.run(job(sampling())).await;
        assert!(error.is_none(), "{error:?}");
        assert_eq!(outputs.iter().map(tokens).collect::<Vec<_>>(), [vec![5], vec![6, 7], vec![8]]);
        let prefill = outputs[0].prefill.unwrap();
        assert_eq!((prefill.cached_tokens, prefill.queued), (2, Some(Duration::from_millis(250))));
        assert!(outputs[1].prefill.is_none() && outputs[1].finish.is_none());
        assert_eq!(outputs[2].finish, Some(Finish::Length));
    }
}

#[tokio::test]
async fn choices_are_requests_after_the_first_one() {
    let server = Server::start(
        server_info(),
        json!({}),
        Box::new(|body| {
            let seed = body["sampling_params"]["sampling_seed"].as_u64().unwrap() as u32;
            events(&[event(&[seed], 1, Value::Null), event(&[seed, 9], 2, length())])
        }),
    )
    .await;
    let sampling = Sampling { n: 3, seed: Some(20), ..sampling() };
    let (outputs, error) = server.run(job(sampling.clone())).await;
    assert!(error.is_none(), "{error:?}");
    for choice in 0..3 {
        let choice_tokens: Vec<u32> =
            outputs.iter().filter(|output| output.choice == choice).flat_map(tokens).collect();
        assert_eq!(choice_tokens, [20 + choice as u32, 9]);
    }
    assert_eq!(
        outputs[0].choice, 0,
        "the other choices wait for it, so that they find the prompt in the cache"
    );
    let requests = server.requests();
    let ids: Vec<&str> = requests.iter().map(|body| body["rid"].as_str().unwrap()).collect();
    assert!(
        requests.len() == 3 && ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2],
        "{ids:?}"
    );

    // A choice that is stopped before its request began is never requested.
    let backend = server.connect().await.unwrap();
    let mut running = backend.start(Arc::new(job(sampling))).await.unwrap();
    running.stop(1);
    while let Some(output) = running.next().await {
        assert_ne!(output.unwrap().choice, 1);
    }
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test]
async fn log_probabilities_belong_to_the_new_tokens() {
    let with_logprobs = |tokens: &[u32], all, finish| {
        let mut event = event(tokens, all, finish);
        let logprobs = tokens.iter().map(|&token| json!([-0.5, token, null])).collect::<Value>();
        let tops = tokens
            .iter()
            .map(|&token| json!([[-0.5, token, null], [null, 6, null], [-2.0, 7, null]]));
        event["meta_info"]["output_token_logprobs"] = logprobs;
        event["meta_info"]["output_top_logprobs"] = tops.collect();
        event
    };
    let cumulative = [with_logprobs(&[5], 1, Value::Null), with_logprobs(&[5, 3], 2, length())];
    let incremental = [with_logprobs(&[5], 1, Value::Null), with_logprobs(&[3], 2, length())];
    for sent in [cumulative, incremental] {
        let server = Server::with(move || events(&sent)).await;
        let (outputs, error) = server.run(job(Sampling { logprobs: Some(2), ..sampling() })).await;
        assert!(error.is_none(), "{error:?}");
        for (output, token) in outputs.iter().zip([5, 3]) {
            let Content::Tokens { logprobs: Some(logprobs), .. } = &output.content else {
                panic!("{output:?}")
            };
            let first = &logprobs[0];
            assert_eq!((logprobs.len(), first.token, first.logprob), (1, TokenId(token), -0.5));
            assert_eq!(first.top, [(TokenId(token), -0.5), (TokenId(6), f32::NEG_INFINITY)]);
        }
    }
    let without = Server::with(|| events(&[event(&[5], 1, length())])).await;
    let (_, error) = without.run(job(Sampling { logprobs: Some(2), ..sampling() })).await;
    assert!(matches!(error, Some(JobError::Dead(_))), "{error:?}");
}

#[tokio::test]
async fn finish_reason_is_converted() {
    for (reason, finish) in [
        (json!({"type": "stop", "matched": 2}), Finish::Eos),
        (json!({"type": "stop", "matched": 394}), Finish::Eos),
        (json!({"type": "stop", "matched": null}), Finish::Eos),
        (json!({"type": "stop", "matched": 7}), Finish::StopToken(TokenId(7))),
        (json!({"type": "stop", "matched": [6, 7]}), Finish::StopToken(TokenId(7))),
        (json!({"type": "stop", "matched": "so"}), Finish::StopString("so".to_owned())),
        (length(), Finish::Length),
    ] {
        let server = Server::with(move || events(&[event(&[5], 1, reason.clone())])).await;
        let (outputs, error) = server.run(job(sampling())).await;
        assert!(error.is_none(), "{error:?}");
        assert_eq!(outputs[0].finish, Some(finish));
    }
}

/// A server that ignores the end of the sequence also ignores stop tokens.
#[tokio::test]
async fn stop_token_ends_choice_with_ignore_eos() {
    let server =
        Server::with(|| events(&[event(&[7], 1, Value::Null), event(&[7, 5, 7, 6], 4, length())]))
            .await;
    for (min_tokens, expected) in [(0, vec![7]), (2, vec![7, 5, 7]), (4, vec![7, 5, 7, 6])] {
        let (outputs, error) =
            server.run(job(Sampling { ignore_eos: true, min_tokens, ..sampling() })).await;
        assert!(error.is_none(), "{error:?}");
        assert_eq!(outputs.iter().flat_map(tokens).collect::<Vec<_>>(), expected);
        let stopped = Finish::StopToken(TokenId(7));
        let finish = if min_tokens == 4 { Finish::Length } else { stopped };
        assert_eq!(outputs.last().unwrap().finish, Some(finish));
    }
}

/// Most errors arrive after the head of the answer, in its stream.
#[tokio::test]
async fn refusal_status_decides_the_error() {
    let error = |code: u16| -> Value {
        json!({"error": {"message": "because", "type": "…", "code": code, "retryable": false}})
    };
    let abort = |code: u16| -> Value {
        json!({"type": "abort", "message": "because", "status_code": code, "err_type": "…"})
    };
    for (status, is_final) in
        [(400, true), (413, true), (404, false), (429, false), (500, false), (503, false)]
    {
        let head = move || {
            let status = StatusCode::from_u16(status).unwrap();
            (status, axum::Json(json!({"error": "because"}))).into_response()
        };
        let failed = error(status);
        let aborted = event(&[181], 1, abort(status));
        let servers = [
            Server::with(head).await,
            Server::with(move || events(std::slice::from_ref(&failed))).await,
            Server::with(move || events(std::slice::from_ref(&aborted))).await,
        ];
        for server in servers {
            let (outputs, error) = server.run(job(sampling())).await;
            let error = error.unwrap();
            assert_eq!(matches!(error, JobError::Rejected { .. }), is_final, "{status}: {error}");
            let is_server_error = match status {
                404 => matches!(error, JobError::UnknownModel { .. }),
                429 => matches!(error, JobError::Overloaded { .. }),
                _ => matches!(error, JobError::ServerFailed { .. }),
            };
            assert_eq!(is_server_error, !is_final, "{status}: {error}");
            assert!(outputs.is_empty() && error.to_string().contains("because"), "{error}");
        }
    }
}

#[tokio::test]
async fn malformed_answer_fails_only_its_job() {
    let raw = |text: &'static str| -> Answer { Box::new(move |_| text.into_response()) };
    let answer_of = |sent: Vec<Value>| -> Answer { Box::new(move |_| events(&sent)) };
    let first = || event(&[5], 1, Value::Null);
    for (what, answer) in [
        ("no JSON", raw("data: {\n\ndata: [DONE]\n\n")),
        ("no event", raw("hello")),
        ("nothing", raw("")),
        ("an event without meta_info", answer_of(vec![json!({})])),
        ("more than requested", answer_of(vec![event(&[5; 5], 5, Value::Null)])),
        ("fewer than before", answer_of(vec![first(), event(&[], 0, Value::Null)])),
        ("fewer than its count", answer_of(vec![event(&[5], 3, Value::Null)])),
        ("more than its count", answer_of(vec![first(), event(&[5, 6, 7], 2, Value::Null)])),
        (
            "more after the end",
            answer_of(vec![event(&[5], 1, length()), event(&[5, 6], 2, length())]),
        ),
        ("no end", answer_of(vec![first()])),
        ("an unknown end", answer_of(vec![event(&[5], 1, json!({"type": "whim"}))])),
        ("an abort", answer_of(vec![event(&[], 0, json!({"type": "abort", "message": "x"}))])),
        ("negative tokens", raw("data: {\"output_ids\": [-1], \"meta_info\": {}}\n\n")),
        ("too large tokens", raw("data: {\"output_ids\": [4294967296]}\n\n")),
        ("too large counts", answer_of(vec![event(&[5], usize::MAX, Value::Null)])),
    ] {
        let server = Server::start(server_info(), json!({}), answer).await;
        let (_, error) = server.run(job(sampling())).await;
        let is_known =
            matches!(error, Some(JobError::Dead(_) | JobError::Failed | JobError::Unfinished));
        assert!(is_known, "{what}: {error:?}");
        // Later jobs are not affected.
        assert!(server.connect().await.is_ok());
    }
    let flood = || {
        let piece = Bytes::from(vec![b'x'; 1 << 20]);
        Body::from_stream(stream::repeat_with(move || Ok::<_, Infallible>(piece.clone())))
            .into_response()
    };
    let (_, error) = Server::with(flood).await.run(job(sampling())).await;
    assert!(
        matches!(&error, Some(JobError::Dead(death)) if death.to_string().contains("too long")),
        "{error:?}"
    );
}

#[tokio::test]
async fn stopped_choice_closes_its_connection() {
    let (dropped, ended) = std::sync::mpsc::channel();
    let server = Server::with(move || {
        let signal = DropSignal(dropped.clone());
        let event = format!("data: {}\n\n", event(&[5], 1, Value::Null));
        // The server notices when it writes.
        let events = stream::unfold((signal, event), |(signal, event)| async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            Some((Ok::<_, Infallible>(event.clone()), (signal, event)))
        });
        Body::from_stream(events).into_response()
    })
    .await;
    let backend = server.connect().await.unwrap();
    let mut running = backend.start(Arc::new(job(Sampling { n: 2, ..sampling() }))).await.unwrap();
    let mut seen = [false; 2];
    while seen != [true; 2] {
        seen[running.next().await.unwrap().unwrap().choice] = true;
    }
    running.stop(0);
    let ended = tokio::task::spawn_blocking(move || {
        ended.recv_timeout(SOON).unwrap();
        ended
    });
    let ended = ended.await.unwrap();
    assert_eq!(running.next().await.unwrap().unwrap().choice, 1, "the other choice continues");
    running.stop(1);
    tokio::task::spawn_blocking(move || ended.recv_timeout(SOON).unwrap()).await.unwrap();
    assert!(running.next().await.is_none());
}

#[tokio::test]
async fn dead_server_ends_its_jobs() {
    let stuck =
        || Body::from_stream(stream::pending::<Result<Bytes, Infallible>>()).into_response();
    let server = Server::with(stuck).await;
    let backend = server.connect().await.unwrap();
    let mut running = backend.start(Arc::new(job(sampling()))).await.unwrap();
    // Stands for a machine that is switched off. Ending the stand-in would not do: the tasks of its
    // connections would keep answering.
    backend.declare_dead(chiasm_backend::DeathReason::new("it was unplugged"));
    assert!(matches!(timeout(SOON, running.next()).await.unwrap(), Some(Err(JobError::Dead(_)))));
    assert!(matches!(backend.start(Arc::new(job(sampling()))).await, Err(JobError::NotTaken(_))));
}
