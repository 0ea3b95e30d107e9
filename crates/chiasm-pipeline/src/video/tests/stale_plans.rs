//! Videos whose frames differ from their containers' indexes.

use chiasm_backend::Input;
use chiasm_types::Role;
use futures_util::StreamExt;

use super::*;
use crate::{Prepared, collect};

/// The number of tokens of a whole file in these tests. The plans have other numbers.
const WHOLE_TOKENS: usize = 9;

/// Returns a pipeline in front of these engines. Its videos have other frames than planned, and
/// their whole files have `tokens` tokens.
async fn stale_videos(engines: Vec<Capabilities>, tokens: usize) -> VideoTest {
    VideoTest::with_engines(engines, scripted(format!("whole={tokens}"))).await
}

/// Counts the video tokens in each plan's prompt.
fn video_tokens(prepared: &Prepared) -> Vec<usize> {
    let count = |tokens: &[TokenId]| tokens.iter().filter(|token| **token == VIDEO_TOKEN).count();
    prepared.plans.iter().map(|plan| count(&plan.tokens)).collect()
}

fn answer() -> Script {
    Script::tokens(&[40]).finish(Finish::Length)
}

#[tokio::test]
async fn whole_file_replaces_missing_frames_of_same_prompt() {
    let clip = clip("h264.mp4");
    let folder = tempfile::tempdir().unwrap();
    let tokens = planned_tokens(&model(folder.path()), &clip);
    let VideoTest { test, _folder } = &stale_videos(vec![capabilities(PLANNED)], tokens).await;
    let prompt = || conversation(&[&clip], json!({}));
    for (model_dtype, cause) in [(None, "agent"), (Some(Dtype::BF16), "other_frames")] {
        let prepared = test.prepare(prompt(), ClientSampling::default()).await.unwrap();
        let fields = tensors(&prepared, TensorFormat::Raw, model_dtype).await;
        assert_eq!((&*fields[0].name, bytes(&fields[0])), ("x", &[1, 2, 3, 4][..]));
        assert_eq!(test.pipeline.metrics.whole_videos(cause), 1);
    }
    // The cut is not decoded again.
    test.prepare(prompt(), ClientSampling::default()).await.unwrap();
    assert_eq!(test.pipeline.metrics.whole_videos("other_frames"), 2);
    assert_eq!(test.pipeline.metrics.replanned(), 0);
}

#[tokio::test]
async fn stale_plan_is_replaced_before_request_is_sent() {
    for is_streamed in [true, false] {
        let test = stale_videos(vec![capabilities(PLANNED)], WHOLE_TOKENS).await;
        let VideoTest { test, _folder } = &test;
        let prompt = || conversation(&[&clip("h264.mp4")], json!({}));
        let mut prepared = test.prepare(prompt(), ClientSampling::default()).await.unwrap();
        let planned = prepared.plans[0].job_items[0].hash;
        let arrived = prepared.arrived;
        assert_ne!(video_tokens(&prepared), [WHOLE_TOKENS]);
        let backend = &test.backends[0];
        backend.next_job(answer());
        let route = if is_streamed {
            let generation = Generation::start(&test.pipeline, &mut prepared).await.unwrap();
            let route = generation.route();
            let deltas: Vec<_> = generation.into_deltas().collect().await;
            assert_eq!(deltas.last().unwrap().as_ref().unwrap().finish, Some(Finish::Length));
            route
        } else {
            collect(&test.pipeline, &mut prepared).await.unwrap().1
        };
        // The caller sees the prompt that the engine got.
        assert_eq!(video_tokens(&prepared), [WHOLE_TOKENS]);
        assert_eq!(route.prompt_tokens, prepared.plans[0].tokens.len());
        let jobs = backend.jobs();
        let [job] = &*jobs else { panic!("one job") };
        let Input::Tokens(tokens) = &job.input else { panic!("tokens") };
        assert_eq!(Some(tokens), prepared.tokens(route.class));
        let whole = job.media[0].hash;
        assert_eq!(backend.requested_items(), [planned, whole]);
        assert_eq!((&job.id, prepared.arrived), (&prepared.id, arrived));

        let metrics = &test.pipeline.metrics;
        assert_eq!((metrics.replanned(), metrics.whole_videos("other_frames")), (1, 1));
        // The whole file is opened and processed once.
        assert_eq!(test.pipeline.media.counts().data, 1);
        assert_eq!(metrics.media_decoded.get(), 1);

        // The next request begins with the new plan.
        let next = test.prepare(prompt(), ClientSampling::default()).await.unwrap();
        assert_eq!(next.plans[0].job_items[0].hash, whole);
        assert_eq!(metrics.replanned(), 1);
    }
}

#[tokio::test]
async fn agent_engine_finds_stale_plan() {
    let VideoTest { test, _folder } =
        &stale_videos(vec![capabilities(PLANNED)], WHOLE_TOKENS).await;
    let prompt = conversation(&[&clip("h264.mp4")], json!({}));
    let prepared = test.prepare(prompt, ClientSampling::default()).await.unwrap();
    // Agents do not tell the type of their models.
    let error = request_tensors(&prepared, TensorFormat::Raw, None).await.unwrap_err();
    assert!(matches!(error.cause, ErrorCause::StalePlan(_)), "{error}");
    assert_eq!(error.field.as_deref(), Some("messages[0].content[1].video_url"));
}

#[tokio::test]
async fn cut_of_stale_plan_is_decoded_once() {
    let once = scripted(format!("once={WHOLE_TOKENS}"));
    let VideoTest { test, _folder } = &VideoTest::with(PLANNED, once).await;
    let prompt = || conversation(&[&clip("h264.mp4")], json!({}));
    let mut first = test.prepare(prompt(), ClientSampling::default()).await.unwrap();
    let mut second = test.prepare(prompt(), ClientSampling::default()).await.unwrap();
    for prepared in [&mut first, &mut second] {
        test.backends[0].next_job(answer());
        Generation::start(&test.pipeline, prepared).await.unwrap();
        // Decoding the cut again would give the planned frames.
        assert_eq!(video_tokens(prepared), [WHOLE_TOKENS]);
    }
    assert_eq!(test.pipeline.metrics.replanned(), 2);
}

#[tokio::test]
async fn many_stale_plans_are_replaced_at_most_twice() {
    let VideoTest { test, _folder } =
        &stale_videos(vec![capabilities(PLANNED)], WHOLE_TOKENS).await;
    let clips = ["h264.mp4", "h264_faststart.mp4", "h264_pyramid.mp4", "vp9.webm"].map(clip);
    let clips = clips.each_ref().map(Vec::as_slice);
    let prompt = conversation(&clips, json!({}));
    let mut prepared = test.prepare(prompt, ClientSampling::default()).await.unwrap();
    test.backends[0].next_job(answer());
    Generation::start(&test.pipeline, &mut prepared).await.unwrap();
    assert_eq!(video_tokens(&prepared), [clips.len() * WHOLE_TOKENS]);
    assert_eq!(test.pipeline.metrics.replanned(), 2);
}

#[tokio::test]
async fn new_plan_without_room_for_answer_is_refused() {
    let VideoTest { test, _folder } = &stale_videos(vec![capabilities(PLANNED)], 5000).await;
    let prompt = conversation(&[&clip("h264.mp4")], json!({}));
    let mut prepared = test.prepare(prompt, ClientSampling::default()).await.unwrap();
    let error = collect(&test.pipeline, &mut prepared).await.unwrap_err();
    assert!(matches!(error.cause, ErrorCause::ContextFull { tokens: 5000, .. }), "{error}");
    assert_eq!(error.field.as_deref(), Some("messages"));
    assert_eq!(test.backends[0].jobs().len(), 0);
}

#[tokio::test]
async fn stale_plan_of_an_earlier_stage_is_replaced() {
    let with_role =
        |role| Capabilities { role, embedding_store_bytes: 1 << 20, ..capabilities(PLANNED) };
    for (stage, answering) in [(Role::Prefill, Role::Decode), (Role::Encode, Role::Aggregated)] {
        let engines = vec![with_role(stage), with_role(answering)];
        let VideoTest { test, _folder } = &stale_videos(engines, WHOLE_TOKENS).await;
        let prompt = conversation(&[&clip("h264.mp4")], json!({}));
        let mut prepared = test.prepare(prompt, ClientSampling::default()).await.unwrap();
        let planned = prepared.plans[0].job_items[0].hash;
        let [earlier, last] = &*test.backends else { panic!("two backends") };
        earlier.next_job(answer());
        last.next_job(answer());
        Generation::start(&test.pipeline, &mut prepared).await.unwrap();
        let whole = prepared.plans[0].job_items[0].hash;
        assert_eq!(earlier.requested_items(), [planned, whole], "{}", stage.name());
        // The answering worker never got the stale plan.
        assert!(!last.requested_items().contains(&planned), "{}", stage.name());
        assert_eq!(video_tokens(&prepared), [WHOLE_TOKENS]);
        assert_eq!(test.pipeline.metrics.replanned(), 1);
    }
}
