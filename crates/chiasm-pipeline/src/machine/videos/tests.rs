use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use chiasm_backend::fake::{FakeBackend, FakeConnector, fake_capabilities};
use chiasm_backend::{
    Capabilities, Connector, FieldValue, ItemField, TensorFormat, TensorMemory, VideoDescription,
    VllmItems,
};
use chiasm_fleet::{Fleet, Patience};
use chiasm_media::{ByteBudget, MediaConfig, MediaLoader};
use chiasm_processor::{ItemLimits, ProcessorOptions};
use chiasm_request::ClientSampling;
use chiasm_router::RouterConfig;
use chiasm_types::{Dtype, TensorField, WorkerId};
use chiasm_vision::VideoOptions;
use tempfile::TempDir;

use super::super::{ItemOrigin, MachineMedia, PlanError, PlannedItem};
use super::*;
use crate::model::ServedModel;
use crate::test_support::TestPipeline;
use crate::test_support::videos::{
    clip, missing_processor, scripted_processor, video, write_model,
};
use crate::{Pipeline, PipelineLimits, VllmProcessorOptions};

const CLIP: &str = "h264_open_gop.mp4";
/// The maximum size of an item at the agent.
const MAX_BYTES: u64 = 1 << 30;

/// The release of the scripted processor.
const RELEASE: &str = "vLLM 0.33.0";

/// Returns a fleet of one engine of this release.
async fn fleet(engine: &str) -> Arc<Fleet> {
    let mut capabilities: Capabilities = fake_capabilities();
    capabilities.engine = engine.to_owned();
    capabilities.class.vllm_items = VllmItems::for_engine(engine);
    let engine = FakeBackend::with_capabilities(capabilities);
    let connector: Box<dyn Connector> = Box::new(FakeConnector::new([Ok(engine)]));
    let fleet =
        Fleet::start(vec![connector], RouterConfig::default(), Patience::default()).unwrap();
    assert!(fleet.wait_ready(1).await);
    fleet
}

fn load_model(folder: &Path) -> Arc<ServedModel> {
    let model = ServedModel::load(folder, "m", None).unwrap();
    Arc::new(model.with_videos(VideoOptions::default(), 9))
}

fn media_loader() -> MediaLoader {
    MediaLoader::new(MediaConfig::default(), ByteBudget::new(1 << 30)).unwrap()
}

/// A frontend that has planned a video for its own engine.
struct Frontend {
    item: JobItem,
    tokens: Arc<Vec<TokenId>>,
}

impl Frontend {
    /// Plans a clip; the processor only decodes the tensors of a local engine.
    async fn new(folder: &Path, engine: &str) -> Self {
        let fleet = fleet(engine).await;
        let limits = PipelineLimits::default();
        let pipeline = Pipeline::new(load_model(folder), media_loader(), fleet, limits);
        let pipeline = Arc::new(pipeline.with_processor(scripted_processor(folder, "frames")));
        let test = TestPipeline { pipeline, backends: Vec::new() };
        let prepared = test.prepare(video(&clip(CLIP)), ClientSampling::default()).await.unwrap();
        let plan = &prepared.plans[0];
        Self { item: plan.job_items[0].clone(), tokens: plan.tokens.clone() }
    }

    fn cuttable(&self) -> &dyn chiasm_backend::CuttableVideo {
        self.item.source.cuttable().unwrap()
    }

    /// Returns the item as it arrives at an agent.
    fn planned(&self) -> PlannedItem {
        PlannedItem {
            modality: Modality::Video,
            hash: self.item.hash,
            origin: ItemOrigin::Cut(self.cuttable().description()),
            placeholder: self.item.placeholder.clone(),
        }
    }
}

/// A frontend and an agent of one model, and the requests that the agent has sent.
struct CutTest {
    frontend: Frontend,
    agent: Arc<MachineMedia>,
    fleet: Arc<Fleet>,
    requests: Arc<Mutex<Vec<RequestReason>>>,
    _folder: TempDir,
}

impl CutTest {
    /// Creates an agent whose processor behaves in this way.
    async fn new(behaviour: &str) -> Self {
        Self::with(|folder| Some(scripted_processor(folder, behaviour))).await
    }

    /// Creates an agent with this processor.
    async fn with(processor: impl FnOnce(&Path) -> Option<VllmProcessorOptions>) -> Self {
        Self::build(RELEASE, Some(MAX_BYTES), processor).await
    }

    async fn build(
        engine: &str,
        max_tensor_bytes: Option<u64>,
        processor: impl FnOnce(&Path) -> Option<VllmProcessorOptions>,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path());
        let fleet = fleet(engine).await;
        let agent = MachineMedia::new(
            load_model(folder.path()),
            media_loader(),
            fleet.clone(),
            &PipelineLimits::default(),
            max_tensor_bytes,
            processor(folder.path()),
            false,
        );
        let frontend = Frontend::new(folder.path(), engine).await;
        Self { frontend, agent, fleet, requests: Arc::default(), _folder: folder }
    }

    /// Returns the slots that the agent announces for its engine.
    fn video_slots(&self) -> Option<u32> {
        self.agent.video_slots(&self.fleet.worker(WorkerId(0)).unwrap())
    }

    /// Lets the agent check an item.
    async fn check(&self, item: PlannedItem) -> Result<JobItem, PlanError> {
        let worker = self.fleet.worker(WorkerId(0)).unwrap();
        let requests = self.requests.clone();
        let request = Arc::new(move |_, reason| requests.lock().unwrap().push(reason));
        let tokens = &self.frontend.tokens;
        let checked = self.agent.check(&worker, tokens, vec![item], None, None, request).await?;
        Ok(checked.items[0].clone())
    }

    /// Waits until the agent has sent `count` requests, and returns the last one.
    async fn request(&self, count: usize) -> RequestReason {
        let requested = async {
            loop {
                if let Some(reason) = self.requests.lock().unwrap().get(count - 1) {
                    return reason.clone();
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), requested).await.unwrap()
    }

    /// Sends the cut that the agent has requested.
    async fn send_cut(&self) {
        assert_eq!(self.request(1).await, RequestReason::Lacking);
        let cut = self.frontend.cuttable().cut(2).await.unwrap();
        self.agent.put_cut(self.frontend.item.hash, cut).unwrap();
    }

    /// Sends tensors of the whole file, which the agent has requested with its request number
    /// `count`, for this cause.
    async fn send_whole(&self, count: usize, cause: &str) {
        let RequestReason::NotDecoded(failure) = self.request(count).await else { panic!("a cut") };
        assert_eq!(failure.cause, cause, "{failure:?}");
        self.agent.put_tensors(self.frontend.item.hash, whole_fields()).unwrap();
    }
}

/// This process's own memory.
struct OwnMemory;

impl TensorMemory for OwnMemory {
    fn reserve(&self, _: usize) -> Option<chiasm_transfer::SlotWriter> {
        None
    }

    fn takes(&self, _: &TensorBytes) -> bool {
        true
    }
}

fn order(format: TensorFormat) -> TensorRequest {
    TensorRequest {
        format,
        model_dtype: Some(Dtype::BF16),
        memory: Arc::new(OwnMemory),
        is_still_needed: Arc::new(|| true),
    }
}

async fn tensors(item: &JobItem, format: TensorFormat) -> Vec<ItemField> {
    item.source.tensors(order(format)).await.unwrap().unwrap()
}

/// Returns tensors that stand for those of a whole file.
fn whole_fields() -> Vec<ItemField> {
    let field = TensorField::Batched { keep_on_cpu: true };
    vec![ItemField { name: "x".into(), field, value: FieldValue::Int(5) }]
}

/// Compares all fields, with the bytes of tensors.
fn assert_equal(one: &[ItemField], other: &[ItemField]) {
    assert!(format!("{one:?}") == format!("{other:?}"), "the tensors differ");
}

#[tokio::test]
async fn tensors_from_a_cut_equal_those_of_a_local_engine() {
    let test = CutTest::new("frames").await;
    let item = test.check(test.frontend.planned()).await.unwrap();
    assert_eq!(item.elements, test.frontend.item.elements);
    for format in [TensorFormat::Raw, TensorFormat::Normalized(Dtype::BF16)] {
        let expected = tensors(&test.frontend.item, format).await;
        assert!(expected.len() > 1);
        let (received, ()) = tokio::join!(tensors(&item, format), test.send_cut());
        assert_equal(&received, &expected);
        // For another engine.
        assert_equal(&tensors(&item, format).await, &expected);
    }
    // The cut is kept, and the second format was made of it.
    assert_eq!(*test.requests.lock().unwrap(), [RequestReason::Lacking]);
}

#[tokio::test]
async fn cut_has_as_many_parts_as_the_agent_decodes_at_once() {
    let test = CutTest::new("frames").await;
    let video = test.frontend.cuttable();
    let parts = async |slots| video.cut(slots).await.unwrap();
    let frames = |parts: &[VideoPart]| parts.iter().map(|part| part.frames.len()).sum::<usize>();
    let one = parts(1).await;
    // A short clip takes one slot.
    assert_eq!(one, parts(64).await);
    assert_eq!(test.video_slots(), Some(2));
    let bytes: u64 = one.iter().map(VideoPart::bytes).sum();
    assert!(bytes <= video.item_bytes() && frames(&one) > 1, "{bytes}");
}

#[tokio::test]
async fn cut_of_other_frames_is_refused() {
    let test = CutTest::new("frames").await;
    let hash = test.frontend.item.hash;
    let item = test.check(test.frontend.planned()).await.unwrap();
    let sent = async {
        assert_eq!(test.request(1).await, RequestReason::Lacking);
        let cut = test.frontend.cuttable().cut(2).await.unwrap();
        let mut fewer = cut.clone();
        fewer[0].frames.pop();
        let mut repeated = cut.clone();
        repeated.push(cut[0].clone());
        let mut other = cut.clone();
        other[0].frames[0].frame += 1000;
        for wrong in [Vec::new(), fewer, repeated, other] {
            let refused = test.agent.put_cut(hash, wrong);
            assert!(matches!(refused, Err(CutError::OtherFrames)), "{refused:?}");
        }
        test.agent.put_cut(hash, cut).unwrap();
    };
    let (received, ()) = tokio::join!(tensors(&item, TensorFormat::Raw), sent);
    assert_equal(&received, &tensors(&test.frontend.item, TensorFormat::Raw).await);
}

#[tokio::test]
async fn undecodable_cut_is_replaced_by_tensors_of_the_whole_file() {
    let test = CutTest::new("whole=1").await;
    let item = test.check(test.frontend.planned()).await.unwrap();
    let sent = async {
        test.send_cut().await;
        test.send_whole(2, CutFailure::OTHER_FRAMES).await;
    };
    let (received, ()) = tokio::join!(tensors(&item, TensorFormat::Raw), sent);
    assert_equal(&received, &whole_fields());
    // The broken cut is not kept.
    let again = item.source.tensors(order(TensorFormat::Raw));
    let is_requested = async { assert_eq!(test.request(3).await, RequestReason::Lacking) };
    tokio::select! {
        _ = again => panic!("the cut was kept"),
        () = is_requested => {}
    }
}

#[tokio::test]
async fn tensors_replace_cuts_that_the_agent_can_not_decode() {
    let limited = |folder: &Path| {
        let options = scripted_processor(folder, "frames");
        let limits =
            ItemLimits { video_duration: Duration::from_millis(1), ..ItemLimits::default() };
        let processor = ProcessorOptions { limits, ..options.processor };
        Some(VllmProcessorOptions { processor, ..options })
    };
    let small = |folder: &Path| {
        let options = scripted_processor(folder, "frames");
        let processor = ProcessorOptions { item_bytes: 1000, ..options.processor };
        Some(VllmProcessorOptions { processor, ..options })
    };
    for (test, cause) in [
        (CutTest::with(|folder| Some(missing_processor(folder))).await, "processor"),
        (CutTest::with(limited).await, "limit"),
        (CutTest::with(small).await, "limit"),
    ] {
        let item = test.check(test.frontend.planned()).await.unwrap();
        let sent = test.send_whole(1, cause);
        let (received, ()) = tokio::join!(tensors(&item, TensorFormat::Raw), sent);
        assert_equal(&received, &whole_fields());
    }
}

#[tokio::test]
async fn processor_of_another_release_decodes_nothing() {
    let processor = |folder: &Path| Some(scripted_processor(folder, "frames"));
    let test = CutTest::build("vLLM 0.32.1", Some(MAX_BYTES), processor).await;
    // Its release is known once it has started.
    assert_eq!(test.video_slots(), Some(2));
    let item = test.check(test.frontend.planned()).await.unwrap();
    let sent = test.send_whole(1, "processor");
    let (received, ()) = tokio::join!(tensors(&item, TensorFormat::Raw), sent);
    assert_equal(&received, &whole_fields());
    assert_eq!(test.video_slots(), None);
}

/// A change of a description, and a part of the reason that the agent gives.
type Change = (fn(&mut VideoDescription), &'static str);

#[tokio::test]
async fn tensors_replace_cuts_of_other_plans() {
    let changes: [Change; 7] = [
        (|video| video.content = [1; 32], "identity"),
        (|video| video.io_kwargs = r#"{"image": 1}"#.into(), "unknown_kwarg"),
        (|video| video.processor_kwargs = "".into(), "invalid_kwarg"),
        (|video| video.processor_kwargs = "[]".into(), "invalid_kwarg"),
        (|video| video.processor_kwargs = r#"{"max_pixels": 50176}"#.into(), "identity"),
        // Other properties are another item, even if the file is the same.
        (|video| video.frames *= 3, "identity"),
        (|video| video.fps += 1e-9, "identity"),
    ];
    for (change, reason) in changes {
        let test = CutTest::new("frames").await;
        let mut planned = test.frontend.planned();
        let ItemOrigin::Cut(video) = &mut planned.origin else { panic!("a cut") };
        change(video);
        let item = test.check(planned).await.unwrap();
        let sent = async {
            let RequestReason::NotDecoded(failure) = test.request(1).await else { panic!("a cut") };
            assert!(
                failure.cause == "other_plan" && failure.reason.contains(reason),
                "{failure:?}"
            );
            test.agent.put_tensors(test.frontend.item.hash, whole_fields()).unwrap();
        };
        let (received, ()) = tokio::join!(tensors(&item, TensorFormat::Raw), sent);
        assert_equal(&received, &whole_fields());
    }
}

#[tokio::test]
async fn wrong_places_of_videos_are_refused() {
    let test = CutTest::new("frames").await;
    let refusal = async |change: &dyn Fn(&mut PlannedItem)| {
        let mut item = test.frontend.planned();
        change(&mut item);
        match test.check(item).await {
            Err(PlanError::Item { number: 0, error }) => error.to_string(),
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("taken"),
        }
    };
    let refused = refusal(&|item| item.placeholder.length -= 1).await;
    assert!(refused.contains("placeholder"), "{refused}");
    let refused = refusal(&|item| item.modality = Modality::Image).await;
    assert!(refused.contains("does not support image"), "{refused}");
    assert!(test.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn extreme_properties_are_not_decoded() {
    let test = CutTest::with(|folder| {
        let options = scripted_processor(folder, "frames");
        let limits =
            ItemLimits { video_duration: Duration::ZERO, video_pixels: 0, ..ItemLimits::default() };
        let processor = ProcessorOptions { limits, ..options.processor };
        Some(VllmProcessorOptions { processor, ..options })
    })
    .await;
    for (frames, fps, width, height) in [
        (u64::MAX, 30.0, 160, 96),
        (1, f64::MIN_POSITIVE, 160, 96),
        (1 << 31, f64::MAX, 1600, 960),
        (60, 30.0, u32::MAX, u32::MAX),
        (60, 30.0, u32::MAX, 1),
        (60, 30.0, 2, u32::MAX),
    ] {
        let mut item = test.frontend.planned();
        let ItemOrigin::Cut(video) = &mut item.origin else { panic!("a cut") };
        *video = VideoDescription { frames, fps, width, height, ..video.clone() };
        // An item without a known size is one whose tensors the frontend makes.
        let is_decoded = test.check(item).await.is_ok_and(|item| item.elements > 0);
        assert!(!is_decoded, "{frames} {fps} {width} {height}");
    }
}

#[tokio::test]
async fn cuts_are_refused_without_tensors_or_processor() {
    let processor = |folder: &Path| Some(scripted_processor(folder, "frames"));
    let without_tensors = CutTest::build(RELEASE, None, processor).await;
    for test in [without_tensors, CutTest::with(|_| None).await] {
        assert_eq!((test.video_slots(), test.agent.max_cut_bytes()), (None, None));
        let refused = test.check(test.frontend.planned()).await;
        assert!(matches!(refused, Err(PlanError::Item { error: ItemError::NoCuts, .. })));
        let refused = test.agent.put_cut(test.frontend.item.hash, Vec::new());
        assert!(matches!(refused, Err(CutError::NotAccepted)));
    }
}
