//! Compares plans of videos with vLLM (`python/goldens/make_video_plan_goldens.py`).

use std::collections::BTreeMap;

use chiasm_types::Dtype;
use chiasm_vision::{
    Contents, PixelFormat, VideoModel, VideoPlan, VideoPlanError, VideoProperties, Vocabulary,
};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::golden;
use crate::video_goldens::{self, Characters, Model};

#[derive(Deserialize)]
struct Goldens {
    models: BTreeMap<String, Model>,
    videos: Vec<Row>,
}

/// The index of the model, the video, `mm_processor_kwargs`, `media_io_kwargs.video`, the result.
#[derive(Debug, Deserialize)]
struct Row(usize, (u64, f64, u32, u32), Map<String, Value>, Map<String, Value>, Expected);

#[derive(Debug, Deserialize, PartialEq)]
#[serde(untagged)]
enum Expected {
    /// The number of loaded frames, the grid or the shape of pixels, the number of video tokens,
    /// and a digest of everything.
    Plan(usize, Vec<usize>, usize, String),
    /// The type of vLLM's error.
    Error(String),
}

fn plan(
    model: &VideoModel,
    (frames, fps, width, height): (u64, f64, u32, u32),
    processor_kwargs: &Map<String, Value>,
    media_io_kwargs: &Map<String, Value>,
) -> Result<VideoPlan, VideoPlanError> {
    let request = model.parse_request(processor_kwargs, media_io_kwargs)?;
    model.plan(VideoProperties { frames, fps, width, height }, &request)
}

fn expectation(plan: &VideoPlan, vocabulary: &dyn Vocabulary) -> Expected {
    let tensors = plan.tensors(PixelFormat::Normalized(Dtype::F32), Dtype::F32).unwrap();
    let pixels = &tensors[0];
    assert_eq!((pixels.name, &pixels.contents), ("pixel_values_videos", &Contents::Pixels));
    let small = |name| {
        tensors.iter().find(|tensor| tensor.name == name).map(|tensor| match &tensor.contents {
            Contents::Small(bytes) => bytes.as_slice(),
            Contents::Pixels => panic!("{name}"),
        })
    };
    let grid: Vec<u32> = small("video_grid_thw")
        .into_iter()
        .flat_map(|bytes| bytes.chunks_exact(8))
        .map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()) as u32)
        .collect();
    let shape: Vec<u32> = pixels.shape.iter().map(|&extent| extent as u32).collect();
    let runs = plan.tokenize(vocabulary).unwrap();
    let mut hasher = blake3::Hasher::new();
    let mut integers = |values: &[u32]| {
        hasher.update(&(values.len() as u32).to_le_bytes());
        values.iter().for_each(|value| {
            hasher.update(&value.to_le_bytes());
        });
    };
    let numbers = |frames: &[u64]| frames.iter().map(|&frame| frame as u32).collect::<Vec<_>>();
    integers(&numbers(&plan.loaded_frames));
    integers(&numbers(&plan.frames));
    integers(&grid);
    integers(&shape);
    let runs: Vec<u32> = runs
        .iter()
        .flat_map(|run| [run.token.0, run.count as u32, u32::from(run.embeds)])
        .collect();
    integers(&runs);
    let timestamps = plan.timestamps.clone().unwrap_or_default();
    hasher.update(&(timestamps.len() as u32).to_le_bytes());
    timestamps.iter().for_each(|seconds| {
        hasher.update(&seconds.to_le_bytes());
    });
    if let Some(seconds) = small("second_per_grid_ts") {
        hasher.update(seconds);
    }
    let extents = if grid.is_empty() { &shape } else { &grid };
    let extents = extents.iter().map(|&extent| extent as usize).collect();
    let digest = hasher.finalize().to_hex()[..16].to_owned();
    Expected::Plan(plan.loaded_frames.len(), extents, plan.tokens, digest)
}

/// Every plan equals vLLM's. What vLLM refuses is not planned; the opposite is rare.
#[test]
fn plans_equal_vllm() {
    let Goldens { models, videos } = golden::json("videos/plans.json");
    assert!(videos.len() >= 3000, "only {} videos", videos.len());
    let loaded: Vec<_> =
        models.iter().map(|(name, model)| (name.as_str(), model, model.load())).collect();
    let mut equal: BTreeMap<&str, usize> = BTreeMap::new();
    let mut refused = 0;
    let mut not_planned: BTreeMap<String, usize> = BTreeMap::new();
    let mut wrong = Vec::new();
    for Row(index, video, kwargs, media_io, expected) in &videos {
        let (name, model, loaded) = &loaded[*index];
        let vocabulary = Characters(model.characters.clone());
        match (plan(loaded, *video, kwargs, media_io), expected) {
            (Err(_), Expected::Error(_)) => refused += 1,
            (Err(error), Expected::Plan(..)) => {
                let sentence = error.to_string();
                let cause = match &error {
                    VideoPlanError::Video { problem, .. } => problem,
                    _ => &sentence,
                };
                *not_planned.entry(cause.clone()).or_default() += 1;
            }
            (Ok(plan), expected) => {
                let ours = expectation(&plan, &vocabulary);
                if ours == *expected {
                    *equal.entry(name).or_default() += 1;
                } else {
                    wrong.push(format!(
                        "{name} {video:?} {kwargs:?} {media_io:?}: {expected:?}, not {ours:?}"
                    ));
                }
            }
        }
    }
    println!("equal: {equal:?}\nrefused by both: {refused}\nnot planned: {not_planned:#?}");
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), videos.len(), wrong.join("\n"));
    assert!(not_planned.values().sum::<usize>() * 30 < videos.len(), "{not_planned:#?}");
}

/// The number of frames, their rate, `media_io_kwargs.video`, the number of picked frames and a
/// digest of their numbers.
#[derive(Debug, Deserialize)]
struct LongVideo(u64, f64, Map<String, Value>, usize, String);

/// The frames of long videos, where float32 rounds most, are those that vLLM's loaders pick.
#[test]
fn frames_of_long_videos_equal_vllm() {
    #[derive(Deserialize)]
    struct LongVideos {
        videos: Vec<LongVideo>,
    }
    // Plans videos of any loader.
    let model = video_goldens::models()["llava_onevision"].load();
    let LongVideos { videos } = golden::json("videos/long_videos.json");
    assert!(videos.len() >= 500, "only {} videos", videos.len());
    for LongVideo(frames, fps, media_io, count, expected) in videos {
        let plan = plan(&model, (frames, fps, 640, 480), &Map::new(), &media_io).unwrap();
        let bytes: Vec<u8> =
            plan.loaded_frames.iter().flat_map(|&frame| (frame as u32).to_le_bytes()).collect();
        let digest = blake3::hash(&bytes).to_hex();
        assert_eq!(plan.loaded_frames.len(), count, "{frames} {fps} {media_io:?}");
        assert_eq!(digest[..16], *expected, "{frames} {fps} {media_io:?}");
    }
}
