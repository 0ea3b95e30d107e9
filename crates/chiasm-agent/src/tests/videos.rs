//! Videos, whose cuts a frontend sends and the agent decodes.

use std::sync::atomic::Ordering::Relaxed;

use chiasm_backend::{ConnectError, SentForm, TensorFormat, VideoPart, VllmItems};
use chiasm_pipeline::test_support::TestPipeline;
use chiasm_pipeline::test_support::videos::{
    clip, missing_processor, scripted_processor, video, write_model,
};
use chiasm_pipeline::{Generation, Pipeline};
use chiasm_request::ClientSampling;
use chiasm_types::Dtype;
use chiasm_video::VideoIndex;
use chiasm_vision::{VideoOptions, VideoProperties};
use tempfile::TempDir;
use tonic::Code;

use super::images::RecordingObserver;
use super::*;
use crate::client::OwnMemory;
use crate::cuts;
use crate::proto::CutChunk;

const CLIP: &str = "h264.mp4";

fn planned_engine() -> FakeBackend {
    let mut capabilities: Capabilities = fake_capabilities();
    capabilities.engine = "vLLM 0.33.0".to_owned();
    capabilities.class.vllm_items = VllmItems::for_engine(&capabilities.engine);
    FakeBackend::with_capabilities(capabilities)
}

fn load_model(folder: &TempDir) -> ServedModel {
    let model = ServedModel::load(folder.path(), "m", None).unwrap();
    model.with_videos(VideoOptions::default(), 9)
}

/// Connects to an agent's engine, for an observer of the test.
struct ObservedConnector {
    connector: AgentConnector,
    observer: Arc<RecordingObserver>,
}

impl Connector for ObservedConnector {
    fn connect(
        &self,
        worker: WorkerId,
        _: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        self.connector.connect(worker, self.observer.clone())
    }

    fn describe(&self) -> String {
        self.connector.describe()
    }

    fn max_retry_pause(&self) -> Duration {
        self.connector.max_retry_pause()
    }
}

/// An agent that decodes videos, and a frontend.
struct VideoTest {
    harness: TestHarness,
    frontend: TestPipeline,
    observer: Arc<RecordingObserver>,
    folder: TempDir,
}

impl VideoTest {
    /// Starts an agent and a frontend with these behaviours of their processors; `None` is a
    /// processor that can't be started.
    async fn new(agent: Option<&str>, frontend: Option<&str>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path());
        let options = |behaviour: Option<&str>| match behaviour {
            Some(behaviour) => scripted_processor(folder.path(), behaviour),
            None => missing_processor(folder.path()),
        };
        let processor = Some(options(agent));
        Self::with(processor, options(frontend), folder).await
    }

    async fn with(
        agent: Option<VllmProcessorOptions>,
        frontend: VllmProcessorOptions,
        folder: TempDir,
    ) -> Self {
        let adapters = Arc::default();
        let model = load_model(&folder);
        let harness = TestHarness::build(planned_engine(), adapters, None, model, agent).await;
        let observer: Arc<RecordingObserver> = Arc::default();
        let processor = fake_capabilities().class.processor;
        let connector = AgentConnector::new(harness.link.clone(), 0, processor);
        let connector = ObservedConnector { connector, observer: observer.clone() };
        let frontend = serve_with(Box::new(connector), frontend, &folder).await;
        Self { harness, frontend, observer, folder }
    }

    /// Sends the engine a request with the clip.
    async fn request(&self) {
        self.harness.engine.next_job(Script::tokens(&[40]).finish(Finish::Length));
        let sampling = ClientSampling::default();
        let mut prepared = self.frontend.prepare(video(&clip(CLIP)), sampling).await.unwrap();
        Generation::start(&self.frontend.pipeline, &mut prepared).await.unwrap();
    }

    /// Returns the number of tokens that the clip's plan has.
    fn planned_tokens(&self) -> usize {
        let (_, plan) = plan(&self.harness.model);
        plan.tokens
    }

    fn sent(&self) -> Vec<SentForm> {
        self.observer.sent.lock().unwrap().clone()
    }

    fn stepped_down(&self) -> Vec<&'static str> {
        self.observer.stepped_down.lock().unwrap().iter().map(|(cause, _)| *cause).collect()
    }
}

/// Starts a frontend of one worker.
async fn serve_with(
    connector: Box<dyn Connector>,
    processor: VllmProcessorOptions,
    folder: &TempDir,
) -> TestPipeline {
    let fleet =
        Fleet::start(vec![connector], RouterConfig::default(), Patience::default()).unwrap();
    assert!(fleet.wait_ready(1).await);
    let loader = MediaLoader::new(MediaConfig::default(), ByteBudget::new(1 << 30)).unwrap();
    let model = Arc::new(load_model(folder));
    let pipeline = Pipeline::new(model, loader, fleet, PipelineLimits::default());
    TestPipeline { pipeline: Arc::new(pipeline.with_processor(processor)), backends: Vec::new() }
}

/// Returns the index and the plan of the clip.
fn plan(model: &ServedModel) -> (VideoIndex, chiasm_vision::VideoPlan) {
    let index = VideoIndex::read(&clip(CLIP)).unwrap();
    let properties = index.properties();
    let properties = VideoProperties {
        frames: properties.frames,
        fps: properties.fps,
        width: properties.width,
        height: properties.height,
    };
    let videos = model.videos.as_ref().unwrap();
    let plan = videos.plan(properties, videos.default_request()).unwrap();
    (index, plan)
}

/// Returns the tensors that an engine would get if it requested those of a job's item again.
async fn tensors(engine: &FakeBackend, job: usize) -> String {
    let request = TensorRequest {
        format: TensorFormat::Raw,
        model_dtype: Some(Dtype::BF16),
        memory: Arc::new(OwnMemory),
        is_still_needed: Arc::new(|| true),
    };
    let source = engine.jobs()[job].media[0].source.clone();
    format!("{:?}", source.tensors(request).await.unwrap().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn video_is_sent_as_its_cut() {
    let test = VideoTest::new(Some("frames"), None).await;
    test.request().await;
    assert_eq!((test.sent(), test.stepped_down()), (vec![SentForm::Cut], vec![]));
    let file = clip(CLIP);
    let (index, plan) = plan(&test.harness.model);
    let cut = index.cut(&file, &plan.frames).unwrap();
    let bytes: usize = cut.parts.iter().map(chiasm_video::CutPart::len).sum();
    assert_eq!(test.observer.sent_bytes.load(Relaxed), bytes as u64);
    assert!(bytes < file.len(), "{bytes}");

    // The tensors are those of a local engine.
    let local = planned_engine();
    let connector = Box::new(FakeConnector::new([Ok(local.clone())]));
    let processor = scripted_processor(test.folder.path(), "frames");
    let frontend = serve_with(connector, processor, &test.folder).await;
    let sampling = ClientSampling::default();
    let mut prepared = frontend.prepare(video(&file), sampling).await.unwrap();
    local.next_job(Script::tokens(&[40]).finish(Finish::Length));
    Generation::start(&frontend.pipeline, &mut prepared).await.unwrap();
    let engine = &test.harness.engine;
    assert_eq!(engine.jobs()[0].media[0].hash, local.jobs()[0].media[0].hash);
    assert!(tensors(engine, 0).await == tensors(&local, 0).await, "the tensors differ");

    // The engine holds the video now.
    test.request().await;
    assert_eq!(test.sent().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agent_without_processor_gets_tensors_of_whole_files() {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path());
    let tokens = plan(&load_model(&folder)).1.tokens;
    let frontend = scripted_processor(folder.path(), &format!("whole={tokens}"));
    let test = VideoTest::with(None, frontend, folder).await;
    test.request().await;
    assert_eq!((test.sent(), test.stepped_down()), (vec![SentForm::Tensors], vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whole_file_replaces_cut_of_other_frames() {
    let tokens = VideoTest::new(None, None).await.planned_tokens();
    let whole = format!("whole={tokens}");
    let test = VideoTest::new(Some("whole=1"), Some(&whole)).await;
    test.request().await;
    assert_eq!(test.sent(), [SentForm::Cut, SentForm::Tensors]);
    assert_eq!(test.stepped_down(), ["cut_not_decoded"]);
    // Later requests are planned with the whole file, which is another item.
    test.request().await;
    let jobs = test.harness.engine.jobs();
    assert_ne!(jobs[0].media[0].hash, jobs[1].media[0].hash);
    assert_eq!(test.sent()[2..], [SentForm::Tensors]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agent_whose_processor_fails_gets_tensors() {
    let tokens = VideoTest::new(None, None).await.planned_tokens();
    let test = VideoTest::new(None, Some(&format!("whole={tokens}"))).await;
    test.request().await;
    assert_eq!(
        (test.sent(), test.stepped_down()),
        (vec![SentForm::Tensors], vec!["cut_not_decoded"])
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_cuts_are_refused() {
    let test = VideoTest::new(None, None).await;
    let (_, mut files) = test.harness.link.clients();
    let mut put =
        async |chunks: Vec<CutChunk>| files.put_cut(tokio_stream::iter(chunks)).await.map(drop);
    let part = VideoPart {
        pieces: vec![Bytes::from_static(b"0123456789")],
        samples: 3,
        frames: vec![chiasm_backend::PartFrame { frame: 7, position: 2 }],
    };
    let messages: Vec<_> = cuts::to_messages(&MmHash::new([5; 32]), vec![part]).collect();
    put(messages.clone()).await.unwrap();
    let [first, rest] = &messages[..] else { panic!("two messages") };
    let with_length = |length| {
        let mut first = first.clone();
        first.parts[0].length = length;
        first
    };
    for chunks in [
        vec![],
        vec![first.clone()],
        vec![first.clone(), rest.clone(), rest.clone()],
        vec![with_length(9), rest.clone()],
        vec![with_length(0), rest.clone()],
        vec![with_length(MAX_TENSOR_BYTES + 1), rest.clone()],
        vec![CutChunk { mm_hash: Bytes::new(), ..first.clone() }, rest.clone()],
        vec![CutChunk { parts: Vec::new(), ..first.clone() }, rest.clone()],
    ] {
        let status = put(chunks.clone()).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status} {chunks:?}");
    }
    // This agent decodes no videos.
    let harness = TestHarness::new().await;
    let (_, mut files) = harness.link.clients();
    let refused = files.put_cut(tokio_stream::iter(messages)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
}
