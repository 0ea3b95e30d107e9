mod stale_plans;

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm_backend::fake::{FakeBackend, Script, fake_capabilities};
use chiasm_backend::{
    Capabilities, FieldValue, Finish, ItemField, JobError, TensorBytes, TensorFormat, TensorMemory,
    TensorRequest,
};
use chiasm_media::{MediaConfig, MediaInput, MediaLoader};
use chiasm_processor::{ItemLimits, ProcessorError, ProcessorOptions};
use chiasm_prompt::{ChatContent, ChatMessage, ChatPart};
use chiasm_request::{Chat, ClientSampling, MediaRef, Prompt};
use chiasm_types::Dtype;
use chiasm_video::VideoIndex;
use chiasm_vision::{ImageSize, RgbView, VideoOptions, VideoProperties};
use serde_json::{Value, json};

use super::*;
use crate::test_support::TestPipeline;
use crate::test_support::videos::{VIDEO_SERVER, clip, missing_processor, write_model};
use crate::{Cause as ErrorCause, Generation, Pipeline, PipelineLimits, VllmProcessorOptions};

const VIDEO_TOKEN: TokenId = TokenId(447);
/// A release whose videos are planned.
const PLANNED: &str = "vLLM 0.33.0";

/// Returns the demo's model with settings and a template of videos.
fn model(folder: &Path) -> ServedModel {
    write_model(folder);
    ServedModel::load(folder, "m", None).unwrap().with_videos(VideoOptions::default(), 999)
}

fn capabilities(engine: &str) -> Capabilities {
    let mut capabilities = fake_capabilities();
    capabilities.class.vllm_items = VllmItems::for_engine(engine);
    capabilities
}

/// A pipeline in front of engines, whose processor of vLLM can't be started.
struct VideoTest {
    test: TestPipeline,
    _folder: tempfile::TempDir,
}

impl VideoTest {
    async fn new(engine: &str) -> Self {
        Self::with(engine, |options| options).await
    }

    async fn with(
        engine: &str,
        change: impl FnOnce(VllmProcessorOptions) -> VllmProcessorOptions,
    ) -> Self {
        Self::with_engines(vec![capabilities(engine)], change).await
    }

    async fn with_engines(
        engines: Vec<Capabilities>,
        change: impl FnOnce(VllmProcessorOptions) -> VllmProcessorOptions,
    ) -> Self {
        let backends = engines.into_iter().map(FakeBackend::with_capabilities).collect();
        let TestPipeline { pipeline, backends } = TestPipeline::with(backends).await;
        let folder = tempfile::tempdir().unwrap();
        let model = Arc::new(model(folder.path()));
        let options = missing_processor(folder.path());
        let media = MediaLoader::new(MediaConfig::default(), ByteBudget::new(1 << 30)).unwrap();
        let fleet = pipeline.fleet.clone();
        let pipeline = Pipeline::new(model, media, fleet, PipelineLimits::default());
        let pipeline = Arc::new(pipeline.with_processor(change(options)));
        Self { test: TestPipeline { pipeline, backends }, _folder: folder }
    }

    async fn prepare(&self, prompt: Prompt) -> Result<crate::Prepared, RequestError> {
        self.test.prepare(prompt, ClientSampling::default()).await
    }

    /// Checks that a request goes to vLLM's processor, which can't be started, for this cause.
    async fn assert_whole(&self, prompt: Prompt, cause: Cause) {
        let error = self.prepare(prompt).await.unwrap_err();
        let is_unavailable = |error| {
            matches!(error, ProcessorError::Unavailable(_) | ProcessorError::NoPython { .. })
        };
        let is_expected = match error.cause.clone() {
            ErrorCause::Processor(error) => is_unavailable(error),
            ErrorCause::Invalid(_) => cause == "untrusted_kwargs",
            _ => false,
        };
        assert!(is_expected, "{cause}: {error}");
        assert_eq!(self.test.pipeline.metrics.whole_videos(cause), 1, "{cause}");
    }
}

/// Returns a conversation with videos.
fn conversation(clips: &[&[u8]], kwargs: Value) -> Prompt {
    let mut parts = vec![ChatPart::Text("what is this?".to_owned())];
    parts.extend(clips.iter().map(|_| ChatPart::Media(Modality::Video)));
    let content = Some(ChatContent::Parts(parts));
    let message = ChatMessage { role: "user".to_owned(), content, ..ChatMessage::default() };
    let media = clips.iter().enumerate().map(|(index, clip)| {
        let url = format!("data:video/mp4;base64,{}", STANDARD.encode(clip));
        MediaRef {
            modality: Modality::Video,
            source: Some(MediaInput::Url(url.into())),
            uuid: None,
            field: format!("messages[0].content[{}].video_url", index + 1),
        }
    });
    let mut chat = Chat {
        messages: vec![message],
        media: media.collect(),
        add_generation_prompt: true,
        ..Chat::default()
    };
    chat.media_kwargs.processor = kwargs.as_object().cloned().unwrap_or_default();
    Prompt::Chat(chat)
}

fn properties(index: &VideoIndex) -> VideoProperties {
    let properties = index.properties();
    VideoProperties {
        frames: properties.frames,
        fps: properties.fps,
        width: properties.width,
        height: properties.height,
    }
}

/// Returns the number of tokens of a clip's plan.
fn planned_tokens(model: &ServedModel, clip: &[u8]) -> usize {
    let video = properties(&VideoIndex::read(clip).unwrap());
    let videos = model.videos.as_ref().unwrap();
    videos.plan(video, videos.default_request()).unwrap().tokens
}

#[tokio::test]
async fn video_is_planned_and_routed_without_processor() {
    for (release, name) in [
        ("vLLM 0.32.1", "h264.mp4"),
        (PLANNED, "h264.mp4"),
        (PLANNED, "h264_edit.mp4"),
        (PLANNED, "hevc.mkv"),
        (PLANNED, "vp9.webm"),
    ] {
        let VideoTest { test, _folder } = &VideoTest::new(release).await;
        let clip = clip(name);
        let backend = &test.backends[0];
        let mut hashes = Vec::new();
        for _ in 0..2 {
            let prompt = conversation(&[&clip], json!({}));
            let mut prepared = test.prepare(prompt, ClientSampling::default()).await.unwrap();
            let plan = &prepared.plans[0];
            let video_tokens = plan.tokens.iter().filter(|token| **token == VIDEO_TOKEN).count();
            assert_eq!(video_tokens, planned_tokens(&test.pipeline.model, &clip), "{name}");
            let item = &plan.job_items[0];
            let placeholder = &item.placeholder;
            assert_eq!((&item.modality, placeholder.length), (&Modality::Video, video_tokens));
            assert_eq!(plan.tokens[placeholder.offset], VIDEO_TOKEN);
            // The item is in the keys.
            assert!(placeholder.offset / 16 < plan.keys.len());
            hashes.push(item.hash);
            backend.hold(item.hash);
            backend.next_job(Script::tokens(&[40]).finish(Finish::Length));
            Generation::start(&test.pipeline, &mut prepared).await.unwrap();
        }
        assert_eq!(hashes[0], hashes[1]);
        assert_eq!(backend.requested_items(), []);
    }
    let VideoTest { test, _folder } = &VideoTest::new(PLANNED).await;
    let rotated = conversation(&[&clip("h264.mp4"), &clip("h264_rotated_90.mp4")], json!({}));
    let prepared = test.prepare(rotated, ClientSampling::default()).await.unwrap();
    let [one, other] = &*prepared.plans[0].job_items else { panic!("two items") };
    assert_ne!(one.hash, other.hash);
}

/// Lets the scripted fork server of the tests behave in this way.
fn scripted(behaviour: String) -> impl FnOnce(VllmProcessorOptions) -> VllmProcessorOptions {
    let vllm_flags = vec![behaviour];
    let python = PathBuf::from(VIDEO_SERVER);
    move |options| VllmProcessorOptions {
        processor: ProcessorOptions { python, vllm_flags, ..options.processor },
        ..options
    }
}

/// No shared memory: all tensors are in this process's own memory.
struct OwnMemory;

impl TensorMemory for OwnMemory {
    fn reserve(&self, _bytes: usize) -> Option<chiasm_transfer::SlotWriter> {
        None
    }

    fn takes(&self, bytes: &TensorBytes) -> bool {
        matches!(bytes, TensorBytes::Here(_))
    }
}

/// Requests the tensors of a prompt's first item, for a model of this type.
async fn request_tensors(
    prepared: &crate::Prepared,
    format: TensorFormat,
    model_dtype: Option<Dtype>,
) -> Result<Vec<ItemField>, RequestError> {
    let memory = Arc::new(OwnMemory);
    let is_still_needed = Arc::new(|| true);
    let order = TensorRequest { format, model_dtype, memory, is_still_needed };
    let tensors = prepared.plans[0].job_items[0].source.tensors(order).await;
    tensors.map(Option::unwrap).map_err(|error| JobError::Source(error).into())
}

/// Returns the tensors of a prompt's first item, for a model of this type.
async fn tensors(
    prepared: &crate::Prepared,
    format: TensorFormat,
    model_dtype: Option<Dtype>,
) -> Vec<ItemField> {
    request_tensors(prepared, format, model_dtype).await.unwrap()
}

fn bytes(field: &ItemField) -> &[u8] {
    let FieldValue::Tensor(tensor) = &field.value else { panic!("a tensor") };
    tensor.bytes.as_ref()
}

#[tokio::test]
async fn planned_frames_become_tensors_in_order() {
    let VideoTest { test, _folder } =
        &VideoTest::with(PLANNED, scripted("frames".to_owned())).await;
    // The second one is cut into several parts.
    for name in ["h264.mp4", "h264_open_gop.mp4"] {
        let clip = clip(name);
        let prompt = conversation(&[&clip], json!({}));
        let prepared = test.prepare(prompt, ClientSampling::default()).await.unwrap();
        let videos = test.pipeline.model.videos.as_ref().unwrap();
        let request = videos.default_request();
        let index = VideoIndex::read(&clip).unwrap();
        let plan = videos.plan(properties(&index), request).unwrap();
        let cut = index.cut(&clip, &plan.frames).unwrap();
        for format in [TensorFormat::Raw, TensorFormat::Normalized(Dtype::BF16)] {
            let pixel_format = crate::processed::pixel_format(format);
            let mut expected = vec![0; plan.pixel_bytes(pixel_format)];
            for frame in cut.parts.iter().flat_map(|part| &part.frames) {
                let size = ImageSize { width: plan.video.width, height: plan.video.height };
                let pixels = vec![frame.position as u8; 3 * size.area() as usize];
                let view = RgbView::new(size, &pixels).unwrap();
                let place = plan.frames.iter().position(|wanted| *wanted == frame.frame).unwrap();
                videos
                    .process_frame(view, place, &plan, request, pixel_format, &mut expected)
                    .unwrap();
            }
            let fields = tensors(&prepared, format, Some(Dtype::BF16)).await;
            assert_eq!(fields[0].name, "pixel_values_videos");
            assert!(bytes(&fields[0]) == expected, "{name} {format}");
            assert_eq!(fields[1].name, "video_grid_thw");
            // For another engine.
            let again = tensors(&prepared, format, Some(Dtype::BF16)).await;
            assert!(bytes(&again[0]) == expected, "{name} {format}");
        }
    }
    let metrics = &test.pipeline.metrics;
    assert_eq!((metrics.media_decoded.get(), metrics.media_reused.get()), (4, 4));
}

#[tokio::test]
async fn missing_processor_fails_with_retryable_error() {
    let VideoTest { test, _folder } = &VideoTest::new(PLANNED).await;
    let prompt = conversation(&[&clip("h264.mp4")], json!({}));
    let mut prepared = test.prepare(prompt, ClientSampling::default()).await.unwrap();
    let error = Generation::start(&test.pipeline, &mut prepared).await.err().unwrap();
    assert!(matches!(error.cause, ErrorCause::Processor(_)), "{error}");
    assert_eq!(error.field.as_deref(), Some("messages[0].content[1].video_url"));
}

#[tokio::test]
async fn unplanned_videos_go_to_processor() {
    for engine in ["vLLM 0.34.0", "vLLM 0.31.0", "vLLM dev"] {
        let test = VideoTest::new(engine).await;
        test.assert_whole(conversation(&[&clip("h264.mp4")], json!({})), "release").await;
    }
    for (name, cause) in [
        ("h264.ts", "container"),
        ("av1.mp4", "codec"),
        ("h264_interlaced.mp4", "interlaced"),
        ("h264_one_frame.mp4", "video"),
        ("h264_in_band_changes.mp4", "parameter_sets"),
    ] {
        let test = VideoTest::new(PLANNED).await;
        test.assert_whole(conversation(&[&clip(name)], json!({})), cause).await;
    }
}

#[tokio::test]
async fn engines_with_small_context_are_left_out() {
    let small = Capabilities { max_model_len: 24, ..capabilities("vLLM 0.32.0") };
    let engines = vec![small, capabilities(PLANNED)];
    let test = VideoTest::with_engines(engines, |options| options).await;
    let prepared = test.prepare(conversation(&[&clip("h264.mp4")], json!({}))).await.unwrap();
    assert!(prepared.plans[0].job_items[0].placeholder.length > 24);
    assert_eq!(prepared.plans.len(), 1);
}

#[tokio::test]
async fn items_of_two_releases_have_two_identities() {
    let engines = vec![capabilities("vLLM 0.32.0"), capabilities(PLANNED)];
    let test = VideoTest::with_engines(engines, |options| options).await;
    let prepared = test.prepare(conversation(&[&clip("h264.mp4")], json!({}))).await.unwrap();
    let [one, other] = &*prepared.plans else { panic!("a plan for each release") };
    assert_eq!(one.tokens, other.tokens);
    assert_ne!(one.job_items[0].hash, other.job_items[0].hash);
}

#[tokio::test]
async fn limits_and_settings_are_left_to_processor() {
    let prompt = |kwargs| conversation(&[&clip("h264.mp4")], kwargs);
    let kwargs = json!({"max_pixels": 50_176});
    let test = VideoTest::new(PLANNED).await;
    test.assert_whole(prompt(kwargs.clone()), "untrusted_kwargs").await;
    let trusting = |options| VllmProcessorOptions { trust_request_kwargs: true, ..options };
    let test = VideoTest::with(PLANNED, trusting).await;
    test.assert_whole(prompt(json!({"use_audio_in_video": true})), "unknown_kwarg").await;
    let small = test.prepare(prompt(kwargs)).await.unwrap();
    let usual = test.prepare(prompt(json!({}))).await.unwrap();
    assert_ne!(small.plans[0].job_items[0].hash, usual.plans[0].job_items[0].hash);

    let limited = |limits| {
        move |options: VllmProcessorOptions| VllmProcessorOptions {
            processor: ProcessorOptions { limits, ..options.processor },
            ..options
        }
    };
    for limits in [
        ItemLimits { video_duration: Duration::from_secs(1), ..ItemLimits::default() },
        ItemLimits { video_pixels: 1000, ..ItemLimits::default() },
    ] {
        let test = VideoTest::with(PLANNED, limited(limits)).await;
        test.assert_whole(prompt(json!({})), "limit").await;
    }
}
