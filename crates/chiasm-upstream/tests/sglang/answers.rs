//! What becomes of a server's answers.

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

use crate::stand_in::{Answer, Server, event, events, length, of_picture, server_info, tokens};
use crate::support::{SOON, job, run, sampling, with_picture};

#[tokio::test]
async fn a_prompt_that_became_another_one_is_distrusted() {
    for (count, prompt, is_trusted) in [
        (5, json!([1, 9, 9, 9, 2]), true),
        (5, Value::Null, true),
        (4, Value::Null, false),
        (3, json!([1, 9, 2]), false),
        (5, json!([1, 9, 9, 8, 2]), false),
    ] {
        let server = Server::with(move || events(&[of_picture(count, prompt.clone())])).await;
        let backend = server.connect().await.unwrap();
        let (_, error) = run(&*backend, with_picture("{}", sampling())).await;
        assert!(error.is_none(), "it is served all the same: {error:?}");
        let distrusted = timeout(Duration::from_millis(50), backend.distrusted()).await;
        assert_eq!(distrusted.is_err(), is_trusted, "{distrusted:?}");
    }
}

#[tokio::test]
async fn not_every_prompt_is_told_back() {
    let server = Server::with(|| events(&[of_picture(5, Value::Null)])).await;
    let backend = server.connect().await.unwrap();
    for _ in 0..40 {
        run(&*backend, with_picture("{}", sampling())).await;
    }
    let told: Vec<bool> =
        server.asked().iter().map(|body| body.get("return_prompt_token_ids").is_some()).collect();
    assert!(told[..16].iter().all(|told| *told), "the first ones");
    assert_eq!(told[16..].iter().filter(|told| **told).count(), 2, "and some later ones");
}

#[tokio::test]
async fn answers_are_the_same_whether_all_is_told_or_what_is_new() {
    let whole = [
        event(&[5], 1, Value::Null),
        event(&[5, 6, 7], 3, Value::Null),
        event(&[5, 6, 7, 8], 4, length()),
    ];
    let news =
        [event(&[5], 1, Value::Null), event(&[6, 7], 3, Value::Null), event(&[8], 4, length())];
    for told in [whole, news] {
        let server = Server::with(move || events(&told)).await;
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
async fn continuations_are_requests_of_their_own_behind_the_first() {
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
        let of_choice: Vec<u32> =
            outputs.iter().filter(|output| output.choice == choice).flat_map(tokens).collect();
        assert_eq!(of_choice, [20 + choice as u32, 9]);
    }
    assert_eq!(
        outputs[0].choice, 0,
        "the others wait for it, so that they find the prompt in the cache"
    );
    let asked = server.asked();
    let ids: Vec<&str> = asked.iter().map(|body| body["rid"].as_str().unwrap()).collect();
    assert!(
        asked.len() == 3 && ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2],
        "{ids:?}"
    );

    // One that is stopped before it has begun is never asked for.
    let backend = server.connect().await.unwrap();
    let mut running = backend.start(Arc::new(job(sampling))).await.unwrap();
    running.stop(1);
    while let Some(output) = running.next().await {
        assert_ne!(output.unwrap().choice, 1);
    }
    assert_eq!(server.asked().len(), 2);
}

#[tokio::test]
async fn log_probabilities_are_those_of_the_new_tokens() {
    let told = |tokens: &[u32], all, finish| {
        let mut event = event(tokens, all, finish);
        let logprobs = tokens.iter().map(|&token| json!([-0.5, token, null])).collect::<Value>();
        let tops = tokens
            .iter()
            .map(|&token| json!([[-0.5, token, null], [null, 6, null], [-2.0, 7, null]]));
        event["meta_info"]["output_token_logprobs"] = logprobs;
        event["meta_info"]["output_top_logprobs"] = tops.collect();
        event
    };
    let whole = [told(&[5], 1, Value::Null), told(&[5, 3], 2, length())];
    let news = [told(&[5], 1, Value::Null), told(&[3], 2, length())];
    for events_told in [whole, news] {
        let server = Server::with(move || events(&events_told)).await;
        let (outputs, error) = server.run(job(Sampling { logprobs: Some(2), ..sampling() })).await;
        assert!(error.is_none(), "{error:?}");
        for (output, token) in outputs.iter().zip([5, 3]) {
            let Content::Tokens { logprobs: Some(told), .. } = &output.content else {
                panic!("{output:?}")
            };
            assert_eq!((told.len(), told[0].token, told[0].logprob), (1, TokenId(token), -0.5));
            assert_eq!(told[0].top, [(TokenId(token), -0.5), (TokenId(6), f32::NEG_INFINITY)]);
        }
    }
    let without = Server::with(|| events(&[event(&[5], 1, length())])).await;
    let (_, error) = without.run(job(Sampling { logprobs: Some(2), ..sampling() })).await;
    assert!(matches!(error, Some(JobError::Dead(_))), "{error:?}");
}

#[tokio::test]
async fn an_answer_ends_as_the_server_says() {
    for (told, finish) in [
        (json!({"type": "stop", "matched": 2}), Finish::Eos),
        (json!({"type": "stop", "matched": 394}), Finish::Eos),
        (json!({"type": "stop", "matched": null}), Finish::Eos),
        (json!({"type": "stop", "matched": 7}), Finish::StopToken(TokenId(7))),
        (json!({"type": "stop", "matched": [6, 7]}), Finish::StopToken(TokenId(7))),
        (json!({"type": "stop", "matched": "so"}), Finish::StopString("so".to_owned())),
        (length(), Finish::Length),
    ] {
        let server = Server::with(move || events(&[event(&[5], 1, told.clone())])).await;
        let (outputs, error) = server.run(job(sampling())).await;
        assert!(error.is_none(), "{error:?}");
        assert_eq!(outputs[0].finish, Some(finish));
    }
}

/// A server that is to go on after the end goes on after stop tokens too.
#[tokio::test]
async fn a_stop_token_ends_an_answer_that_goes_on_after_its_end() {
    let server =
        Server::with(|| events(&[event(&[7], 1, Value::Null), event(&[7, 5, 7, 6], 4, length())]))
            .await;
    for (min_tokens, wanted) in [(0, vec![7]), (2, vec![7, 5, 7]), (4, vec![7, 5, 7, 6])] {
        let (outputs, error) =
            server.run(job(Sampling { ignore_eos: true, min_tokens, ..sampling() })).await;
        assert!(error.is_none(), "{error:?}");
        assert_eq!(outputs.iter().flat_map(tokens).collect::<Vec<_>>(), wanted);
        let stopped = Finish::StopToken(TokenId(7));
        let finish = if min_tokens == 4 { Finish::Length } else { stopped };
        assert_eq!(outputs.last().unwrap().finish, Some(finish));
    }
}

/// Most of them come after the head of the answer, in its stream.
#[tokio::test]
async fn refusals_tell_whose_fault_it_is() {
    let error = |code: u16| json!({"error": {"message": "because", "type": "…", "code": code, "retryable": false}});
    let abort = |code: u16| json!({"type": "abort", "message": "because", "status_code": code, "err_type": "…"});
    for (status, is_final) in
        [(400, true), (413, true), (404, false), (429, false), (500, false), (503, false)]
    {
        let head = move || {
            let status = StatusCode::from_u16(status).unwrap();
            (status, axum::Json(json!({"error": "because"}))).into_response()
        };
        let (told, aborted) = (error(status), event(&[181], 1, abort(status)));
        let servers = [
            Server::with(head).await,
            Server::with(move || events(std::slice::from_ref(&told))).await,
            Server::with(move || events(std::slice::from_ref(&aborted))).await,
        ];
        for server in servers {
            let (outputs, error) = server.run(job(sampling())).await;
            let error = error.unwrap();
            assert_eq!(matches!(error, JobError::Rejected { .. }), is_final, "{status}: {error}");
            let is_the_servers = match status {
                404 => matches!(error, JobError::UnknownModel { .. }),
                429 => matches!(error, JobError::Overloaded { .. }),
                _ => matches!(error, JobError::ServerFailed { .. }),
            };
            assert_eq!(is_the_servers, !is_final, "{status}: {error}");
            assert!(outputs.is_empty() && error.to_string().contains("because"), "{error}");
        }
    }
}

#[tokio::test]
async fn nonsense_hurts_the_job_that_it_is_told_to() {
    let raw = |text: &'static str| -> Answer { Box::new(move |_| text.into_response()) };
    let told = |told: Vec<Value>| -> Answer { Box::new(move |_| events(&told)) };
    let first = || event(&[5], 1, Value::Null);
    for (what, answer) in [
        ("no JSON", raw("data: {\n\ndata: [DONE]\n\n")),
        ("no event", raw("hello")),
        ("nothing", raw("")),
        ("an event that says nothing", told(vec![json!({})])),
        ("more than was asked for", told(vec![event(&[5; 5], 5, Value::Null)])),
        ("fewer than before", told(vec![first(), event(&[], 0, Value::Null)])),
        ("fewer than it counts", told(vec![event(&[5], 3, Value::Null)])),
        ("more than it counts", told(vec![first(), event(&[5, 6, 7], 2, Value::Null)])),
        ("more behind the end", told(vec![event(&[5], 1, length()), event(&[5, 6], 2, length())])),
        ("no end", told(vec![first()])),
        ("an end that is none", told(vec![event(&[5], 1, json!({"type": "whim"}))])),
        ("an abort", told(vec![event(&[], 0, json!({"type": "abort", "message": "x"}))])),
        ("tokens that are none", raw("data: {\"output_ids\": [-1], \"meta_info\": {}}\n\n")),
        ("tokens beyond all", raw("data: {\"output_ids\": [4294967296]}\n\n")),
        ("counts beyond all", told(vec![event(&[5], usize::MAX, Value::Null)])),
    ] {
        let server = Server::start(server_info(), json!({}), answer).await;
        let (_, error) = server.run(job(sampling())).await;
        let is_known =
            matches!(error, Some(JobError::Dead(_) | JobError::Failed | JobError::Unfinished));
        assert!(is_known, "{what}: {error:?}");
        // The next one is not hurt.
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

/// Says when it is dropped.
struct Tell(std::sync::mpsc::Sender<()>);

impl Drop for Tell {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

#[tokio::test]
async fn a_job_that_nobody_wants_any_more_ends_its_connections() {
    let (dropped, ended) = std::sync::mpsc::channel();
    let server = Server::with(move || {
        let tell = Tell(dropped.clone());
        let event = format!("data: {}\n\n", event(&[5], 1, Value::Null));
        // The server notices when it writes.
        let events = stream::unfold((tell, event), |(tell, event)| async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            Some((Ok::<_, Infallible>(event.clone()), (tell, event)))
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
    assert_eq!(running.next().await.unwrap().unwrap().choice, 1, "the other goes on");
    running.stop(1);
    tokio::task::spawn_blocking(move || ended.recv_timeout(SOON).unwrap()).await.unwrap();
    assert!(running.next().await.is_none());
}

#[tokio::test]
async fn a_server_that_is_gone_is_found_to_be_so() {
    let stuck =
        || Body::from_stream(stream::pending::<Result<Bytes, Infallible>>()).into_response();
    let server = Server::with(stuck).await;
    let backend = server.connect().await.unwrap();
    let mut running = backend.start(Arc::new(job(sampling()))).await.unwrap();
    // This stands for a machine that is switched off: tasks of the stand-in's connections would
    // answer on.
    backend.declare_dead(chiasm_backend::Death::new("it was unplugged"));
    assert!(matches!(timeout(SOON, running.next()).await.unwrap(), Some(Err(JobError::Dead(_)))));
    assert!(matches!(backend.start(Arc::new(job(sampling()))).await, Err(JobError::NotTaken(_))));
}
