//! Compares pixel tensors of videos with vLLM (`python/goldens/make_video_pixel_goldens.py`).

use std::collections::BTreeMap;

use chiasm_types::Dtype;
use chiasm_vision::{Contents, ImageSize, PixelFormat, RgbView, VideoProperties, VisionError};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::fixture_image::FixtureImage;
use crate::{golden, video_goldens};

#[derive(Deserialize)]
struct Goldens {
    videos: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    model: String,
    video: (u64, f64, u32, u32),
    media_io: Map<String, Value>,
    /// The kind of each frame; its seed is the number of the frame.
    kind: String,
    shape: Vec<usize>,
    float32: String,
    float16: String,
    bfloat16: String,
    uint8: String,
    /// The hashes of `second_per_grid_ts` by type.
    seconds: Option<BTreeMap<String, String>>,
}

#[test]
fn pixels_equal_vllm() {
    let models = video_goldens::models();
    let Goldens { videos } = golden::json("videos/pixels.json");
    assert!(videos.len() >= 70, "only {} videos", videos.len());
    for (number, row) in videos.iter().enumerate() {
        let model = models[&row.model].load();
        let (frames, fps, width, height) = row.video;
        let video = VideoProperties { frames, fps, width, height };
        let request = model.parse_request(&Map::new(), &row.media_io).unwrap();
        let plan = model.plan(video, &request).unwrap();
        let name = format!("{} {video:?}", row.model);
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let tensors = plan.tensors(PixelFormat::RawU8, dtype).unwrap();
            let seconds = tensors.iter().find(|tensor| tensor.name == "second_per_grid_ts");
            let hash = seconds.map(|tensor| {
                assert_eq!((tensor.dtype, tensor.shape.len()), (dtype, 0), "{name}");
                let Contents::Small(bytes) = &tensor.contents else { panic!("{name}") };
                blake3::hash(bytes).to_hex().to_string()
            });
            let expected = row.seconds.as_ref().map(|hashes| &hashes[dtype.torch_name()]);
            assert_eq!(hash.as_ref(), expected, "{name} {dtype:?}");
        }
        let size = ImageSize { width, height };
        let images: Vec<_> = plan
            .frames
            .iter()
            .map(|&frame| {
                let kind = row.kind.clone();
                FixtureImage { kind, width, height, seed: frame as u32 }.pixels()
            })
            .collect();
        for (format, expected) in [
            (PixelFormat::RawU8, &row.uint8),
            (PixelFormat::Normalized(Dtype::F32), &row.float32),
            (PixelFormat::Normalized(Dtype::F16), &row.float16),
            (PixelFormat::Normalized(Dtype::BF16), &row.bfloat16),
        ] {
            let tensors = plan.tensors(format, Dtype::F32).unwrap();
            assert_eq!(tensors[0].shape, row.shape, "{name}");
            let mut tensor = vec![0xA5; plan.pixel_bytes(format)];
            // The order of frames does not matter.
            let mut order: Vec<_> = (0..images.len()).collect();
            if number % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let frame = RgbView::new(size, &images[index]).unwrap();
                model.process_frame(frame, index, &plan, &request, format, &mut tensor).unwrap();
            }
            assert_eq!(&blake3::hash(&tensor).to_hex()[..], expected, "{name} {format:?}");
        }
    }
}

#[test]
fn mismatched_frame_is_refused() {
    let model = video_goldens::models()["qwen2_vl"].load();
    let request = model.default_request();
    let video = VideoProperties { frames: 8, fps: 4.0, width: 60, height: 40 };
    let plan = model.plan(video, request).unwrap();
    let format = PixelFormat::RawU8;
    let mut tensor = vec![0; plan.pixel_bytes(format)];
    let pixels = vec![0; 3 * 60 * 40];
    let frame = |width, height| RgbView::new(ImageSize { width, height }, &pixels).unwrap();
    let process = |frame, index, tensor: &mut [u8]| {
        model.process_frame(frame, index, &plan, request, format, tensor)
    };
    let result = process(frame(40, 60), 0, &mut tensor);
    assert!(matches!(result, Err(VisionError::SizeMismatch { .. })));
    let result = process(frame(60, 40), plan.frames.len(), &mut tensor);
    assert!(matches!(result, Err(VisionError::FrameIndex { .. })));
    let result = process(frame(60, 40), 0, &mut tensor[1..]);
    assert!(matches!(result, Err(VisionError::OutputLength { .. })));
}
