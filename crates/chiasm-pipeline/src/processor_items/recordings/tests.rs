use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm_backend::fake::{FakeBackend, Script, fake_capabilities};
use chiasm_backend::{
    FieldValue, Finish, SourceError, TensorBytes, TensorFormat, TensorMemory, TensorRequest,
    VllmItems,
};
use chiasm_media::{ByteBudget, MediaConfig, MediaInput, MediaLoader};
use chiasm_processor::{ItemLimits, ProcessorError, ProcessorOptions, Sandbox};
use chiasm_prompt::{ChatContent, ChatMessage, ChatPart};
use chiasm_request::{Chat, ClientSampling, MediaRef, Prompt};
use chiasm_types::TokenId;
use serde_json::json;

use super::*;
use crate::model::ServedModel;
use crate::test_support::TestPipeline;
use crate::{Cause as ErrorCause, Generation, Pipeline, PipelineLimits, Prepared};

/// The demo's model, which knows no recordings.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model");
const AUDIO_TOKEN: TokenId = TokenId(447);
const FIELD: &str = "messages[0].content[1].audio_url";
/// The tokens of a second.
const SECOND_TOKENS: usize = 25;

/// A pipeline whose scripted fork server makes recordings.
struct RecordingTest {
    test: TestPipeline,
    _folder: tempfile::TempDir,
}

impl RecordingTest {
    /// Creates a pipeline in front of one engine. `behaviour` is that of `tests/audio_server.py`.
    async fn new(behaviour: &str) -> Self {
        Self::with(behaviour, |options| options).await
    }

    async fn with(
        behaviour: &str,
        change: impl FnOnce(VllmProcessorOptions) -> VllmProcessorOptions,
    ) -> Self {
        let mut capabilities = fake_capabilities();
        capabilities.class.vllm_items = VllmItems::for_engine("vLLM 0.33.0");
        let backends = vec![FakeBackend::with_capabilities(capabilities)];
        let TestPipeline { pipeline, backends } = TestPipeline::with(backends).await;
        let folder = tempfile::tempdir().unwrap();
        let model = Arc::new(model(folder.path()));
        let mut options = options();
        options.processor.python =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/audio_server.py");
        options.processor.model = folder.path().to_owned();
        options.processor.vllm_flags = vec![behaviour.to_owned()];
        options.processor.item_bytes = 2 << 30;
        options.processor.limits = ItemLimits::default();
        let media = MediaLoader::new(MediaConfig::default(), ByteBudget::new(1 << 30)).unwrap();
        let fleet = pipeline.fleet.clone();
        let pipeline = Pipeline::new(model, media, fleet, PipelineLimits::default());
        let pipeline = Arc::new(pipeline.with_processor(change(options)));
        Self { test: TestPipeline { pipeline, backends }, _folder: folder }
    }

    async fn prepare(&self, file: &[u8]) -> Result<Prepared, RequestError> {
        self.test
            .prepare(conversation(&[file.to_vec()], json!({})), ClientSampling::default())
            .await
    }

    /// The number of recordings that were planned, and that the processor made.
    fn counts(&self) -> (u64, u64) {
        let metrics = &self.test.pipeline.metrics;
        (metrics.planned_recordings(), metrics.media_decoded.get())
    }

    fn whole(&self, cause: Cause) -> u64 {
        self.test.pipeline.metrics.whole_recordings(cause)
    }
}

/// Returns the demo's model with a template of recordings.
fn model(folder: &Path) -> ServedModel {
    for file in std::fs::read_dir(MODEL).unwrap() {
        let path = file.unwrap().path();
        std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    let template = folder.join("chat_template.jinja");
    let text = std::fs::read_to_string(&template).unwrap();
    let branch = "{%- elif part.type == 'text' -%}";
    assert!(text.contains(branch));
    let audio = "{%- elif part.type == 'audio' -%}\n<|vision_start|><|video_pad|><|vision_end|>\n";
    std::fs::write(&template, text.replace(branch, &format!("{audio}{branch}"))).unwrap();
    ServedModel::load(folder, "m", None).unwrap()
}

/// Returns a WAVE file of silence, 16 bits at 16 kHz.
fn silence(samples: u32) -> Vec<u8> {
    let bytes = 2 * samples;
    let layout = [1_u32 << 16 | 1, 16_000, 32_000, 16 << 16 | 2];
    let mut file = b"RIFF".to_vec();
    file.extend((36 + bytes).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0");
    file.extend(layout.into_iter().flat_map(u32::to_le_bytes));
    file.extend(b"data");
    file.extend(bytes.to_le_bytes());
    file.resize(file.len() + bytes as usize, 0);
    file
}

fn conversation(files: &[Vec<u8>], kwargs: Value) -> Prompt {
    let text = ChatPart::Text("what is this?".to_owned());
    let recordings = files.iter().map(|_| ChatPart::Media(Modality::Audio));
    let parts = [text].into_iter().chain(recordings).collect();
    let content = Some(ChatContent::Parts(parts));
    let message = ChatMessage { role: "user".to_owned(), content, ..ChatMessage::default() };
    let media = files.iter().enumerate().map(|(index, file)| MediaRef {
        modality: Modality::Audio,
        source: Some(MediaInput::Url(format!("data:;base64,{}", STANDARD.encode(file)).into())),
        uuid: None,
        field: format!("messages[0].content[{}].audio_url", index + 1),
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

fn audio_tokens(prepared: &Prepared) -> usize {
    prepared.plans[0].tokens.iter().filter(|token| **token == AUDIO_TOKEN).count()
}

fn hash(prepared: &Prepared) -> MmHash {
    prepared.plans[0].job_items[0].hash
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

/// Requests the tensors of the recording. Returns the bytes of the first one.
async fn tensors(prepared: &Prepared) -> Result<Vec<u8>, SourceError> {
    let order = TensorRequest {
        format: TensorFormat::Raw,
        model_dtype: None,
        memory: Arc::new(OwnMemory),
        is_still_needed: Arc::new(|| true),
    };
    let fields = prepared.plans[0].job_items[0].source.tensors(order).await?.unwrap();
    let FieldValue::Tensor(tensor) = &fields[0].value else { panic!("a tensor") };
    Ok(tensor.bytes.as_ref().to_vec())
}

#[tokio::test]
async fn recording_is_planned_and_routed_without_decoding() {
    let test = RecordingTest::new("refuse").await;
    let backend = &test.test.backends[0];
    let file = silence(16_000);
    for _ in 0..2 {
        let mut prepared = test.prepare(&file).await.unwrap();
        assert_eq!(audio_tokens(&prepared), SECOND_TOKENS);
        let item = &prepared.plans[0].job_items[0];
        let placeholder = &item.placeholder;
        assert_eq!((&item.modality, placeholder.length), (&Modality::Audio, SECOND_TOKENS));
        backend.hold(item.hash);
        backend.next_job(Script::tokens(&[40]).finish(Finish::Length));
        Generation::start(&test.test.pipeline, &mut prepared).await.unwrap();
    }
    assert_eq!(backend.requested_items(), []);
    assert_eq!(test.counts(), (1, 0));
}

#[tokio::test]
async fn planned_recording_is_made_for_an_engine() {
    let test = RecordingTest::new("tokens=25").await;
    let prepared = test.prepare(&silence(16_000)).await.unwrap();
    assert_eq!(test.counts(), (1, 0));
    assert_eq!(tensors(&prepared).await.unwrap(), [1, 2, 3, 4]);
    assert_eq!(test.counts(), (1, 1));
    let again = test.prepare(&silence(16_000)).await.unwrap();
    assert_eq!(hash(&again), hash(&prepared));
}

#[tokio::test]
async fn other_length_leads_to_another_plan() {
    let test = RecordingTest::new("tokens=9").await;
    let planned = test.prepare(&silence(16_000)).await.unwrap();
    for _ in 0..2 {
        let error = tensors(&planned).await.unwrap_err().downcast::<RequestError>().unwrap();
        assert!(matches!(error.cause, ErrorCause::StalePlan(_)), "{error}");
        assert_eq!(error.field.as_deref(), Some(FIELD));
    }
    let whole = test.prepare(&silence(16_000)).await.unwrap();
    assert_eq!((audio_tokens(&planned), audio_tokens(&whole)), (SECOND_TOKENS, 9));
    assert_ne!(hash(&whole), hash(&planned));
    assert_eq!(tensors(&whole).await.unwrap(), [1, 2, 3, 4]);
    // The tensors that did not fit the first plan fit the second one.
    assert_eq!(test.counts(), (1, 1));
    assert_eq!(test.whole(OTHER_LENGTH), 1);
}

#[tokio::test]
async fn request_with_other_length_is_planned_again() {
    let test = RecordingTest::new("tokens=9").await;
    let mut prepared = test.prepare(&silence(16_000)).await.unwrap();
    let planned = hash(&prepared);
    let backend = &test.test.backends[0];
    backend.next_job(Script::tokens(&[40]).finish(Finish::Length));
    Generation::start(&test.test.pipeline, &mut prepared).await.unwrap();
    assert_eq!(audio_tokens(&prepared), 9);
    assert_eq!(backend.requested_items(), [planned, hash(&prepared)]);
    assert_eq!(test.counts(), (1, 1));
    assert_eq!(test.test.pipeline.metrics.replanned(), 1);
}

#[tokio::test]
async fn many_other_lengths_are_planned_again_at_most_twice() {
    let test = RecordingTest::new("tokens=9").await;
    let files = [16_000, 16_001, 16_002, 16_003].map(silence);
    let prompt = conversation(&files, json!({}));
    let mut prepared = test.test.prepare(prompt, ClientSampling::default()).await.unwrap();
    test.test.backends[0].next_job(Script::tokens(&[40]).finish(Finish::Length));
    Generation::start(&test.test.pipeline, &mut prepared).await.unwrap();
    assert_eq!(audio_tokens(&prepared), 9 * files.len());
    assert_eq!(test.test.pipeline.metrics.replanned(), 2);
    // Each file is decoded once, whether its length was found to be wrong or no longer predicted.
    assert_eq!((test.counts(), test.whole(OTHER_LENGTH)), ((4, 4), 4));
}

#[tokio::test]
async fn refused_recording_has_the_status_of_the_processor() {
    let test = RecordingTest::new("refuse").await;
    let mut prepared = test.prepare(&silence(16_000)).await.unwrap();
    let error = Generation::start(&test.test.pipeline, &mut prepared).await.err().unwrap();
    let is_refused = |error: &RequestError| {
        matches!(&error.cause, ErrorCause::Processor(ProcessorError::Refused(reason))
            if reason == "not a recording")
    };
    assert!(is_refused(&error), "{error}");
    assert_eq!(error.field.as_deref(), Some(FIELD));
    // A recording that can't be planned fails earlier, in the same way.
    let error = test.prepare(b"OggS").await.unwrap_err();
    assert!(is_refused(&error), "{error}");
    assert_eq!(error.field.as_deref(), Some(FIELD));
}

#[tokio::test]
async fn unknown_lengths_are_decoded_first() {
    for (file, cause) in [
        (b"OggS".to_vec(), "container"),
        (silence(320), "empty"),
        // A minute and a sample, and a mebibyte and more.
        (silence(960_001), "limit"),
        ([silence(16_000), vec![0; 1 << 20]].concat(), "limit"),
    ] {
        let test = RecordingTest::new("tokens=9").await;
        let prepared = test.prepare(&file).await.unwrap();
        assert_eq!(audio_tokens(&prepared), 9, "{cause}");
        assert_eq!((test.counts(), test.whole(cause)), ((0, 1), 1), "{cause}");
    }
}

#[tokio::test]
async fn unknown_settings_are_left_to_processor() {
    let test = RecordingTest::new("tokens=9").await;
    let kwargs = json!({"truncation": false});
    let prompt = conversation(&[silence(16_000)], kwargs);
    let prepared = test.test.prepare(prompt, ClientSampling::default()).await.unwrap();
    assert_eq!((audio_tokens(&prepared), test.whole("kwargs")), (9, 1));

    let option = |options| VllmProcessorOptions { predicts_recordings: false, ..options };
    let test = RecordingTest::with("tokens=9", option).await;
    test.prepare(&silence(16_000)).await.unwrap();
    assert_eq!(test.whole("option"), 1);
}

#[tokio::test]
async fn formulas_that_differ_from_probes_are_not_used() {
    let test = RecordingTest::new("other_probes").await;
    let error = test.prepare(&silence(16_000)).await.unwrap_err();
    // The scripted server makes no items with this behaviour.
    assert!(matches!(error.cause, ErrorCause::Processor(_)), "{error}");
    assert_eq!((test.counts().0, test.whole("model")), (0, 1));
}

fn options() -> VllmProcessorOptions {
    VllmProcessorOptions {
        processor: ProcessorOptions {
            python: PathBuf::new(),
            model: PathBuf::new(),
            vllm_flags: Vec::new(),
            children: 1,
            queue: 8,
            timeout: Duration::from_secs(60),
            startup_timeout: Duration::from_secs(60),
            restart_pause: Duration::from_secs(5),
            item_bytes: 1 << 20,
            address_space: 0,
            limits: ItemLimits { audio_duration: Duration::from_secs(30), ..ItemLimits::default() },
            sandbox: Sandbox::Off,
        },
        other_pythons: Vec::new(),
        required: true,
        at_start: false,
        may_render_conversations: false,
        trust_request_kwargs: true,
        predicts_recordings: true,
        concurrent_videos: 1,
    }
}

fn greeting() -> Greeting {
    serde_json::from_value(json!({
        "vllm": "0.33.0+cpu",
        "limits": {"audio": null},
        "max_tokens": {},
        "placeholders": {},
        "video_processor": null,
        "audio": {
            "processor": "Qwen2_5OmniThinkerMultiModalProcessor",
            "extractor": {
                "kind": "WhisperFeatureExtractor",
                "sampling_rate": 16_000,
                "hop_length": 160,
                "max_samples": 480_000,
                "features": 128,
            },
            "resampling": {"method": "torchaudio", "rate": 16_000},
            "channels": 1,
            "loader": {"name": "torchcodec", "ffmpeg": 8},
            "max_file_mib": null,
            "max_seconds": null,
            "max_decoded_bytes": null,
            "probes": [{
                "samples": 16_000,
                "rate": 16_000,
                "elements": 12_800,
                "updates": [{"mode": "replace", "target": [5], "full": [[6, 25]]}],
            }],
        },
        "own_prompts": ["_maybe_apply_prompt_updates"],
        "renderer": "hf",
        "writes_conversations": false,
        "missing": [],
        "sandbox": false,
    }))
    .unwrap()
}

#[test]
fn only_known_processing_is_predicted() {
    fn changed(change: impl FnOnce(&mut Greeting)) -> Result<(), Cause> {
        let mut greeting = greeting();
        change(&mut greeting);
        RecordingPredictor::new(&greeting, &options()).map(drop)
    }
    fn audio(greeting: &mut Greeting) -> &mut AudioDescription {
        greeting.audio.as_mut().unwrap()
    }
    assert_eq!(changed(|_| {}), Ok(()));
    assert_eq!(changed(|greeting| greeting.vllm = "0.34.0".to_owned()), Err("family"));
    assert_eq!(changed(|greeting| greeting.vllm = "dev".to_owned()), Err("family"));
    assert_eq!(changed(|greeting| greeting.audio = None), Err("family"));
    assert_eq!(changed(|greeting| audio(greeting).processor.push('2')), Err("family"));
    assert_eq!(changed(|greeting| audio(greeting).extractor.kind.push('2')), Err("model"));
    assert_eq!(changed(|greeting| audio(greeting).extractor.hop_length = 200), Err("model"));
    assert_eq!(
        changed(|greeting| audio(greeting).resampling.method = "soxr".to_owned()),
        Err("model")
    );
    assert_eq!(changed(|greeting| audio(greeting).channels = None), Err("model"));
    assert_eq!(changed(|greeting| audio(greeting).probes.clear()), Err("model"));
    assert_eq!(changed(|greeting| audio(greeting).probes[0].elements = 1), Err("model"));
    assert_eq!(changed(|greeting| audio(greeting).loader = None), Err("loader"));
}

#[test]
fn own_limits_are_left_to_processor() {
    let predict = |options: &VllmProcessorOptions, samples| {
        let predictor = RecordingPredictor::new(&greeting(), options).unwrap();
        predictor.predict(&silence(samples)).map(|predicted| predicted.elements)
    };
    let mut options = options();
    assert_eq!(predict(&options, 16_000), Ok(12_800));
    assert_eq!(predict(&options, 480_001), Err("limit"));
    options.processor.limits.audio_duration = Duration::ZERO;
    // The file and its tensors take more than a mebibyte.
    assert_eq!(predict(&options, 480_001), Err("limit"));
    options.processor.item_bytes = 1 << 30;
    assert_eq!(predict(&options, 480_001), Ok(384_000));
}
