//! Videos, settings and kwargs that must not be planned, and must not cause a panic.

use chiasm_vision::{PixelFormat, VideoModel, VideoOptions, VideoPlanError, VideoProperties};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::video_goldens::{self, Model};

/// Returns the model with changes of a file.
fn with_changes(name: &str, file: &str, changes: Value) -> Model {
    let mut model = video_goldens::models().remove(name).unwrap();
    let contents = model.files.get_mut(file).unwrap().as_object_mut().unwrap();
    contents.extend(changes.as_object().unwrap().clone());
    model
}

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

#[test]
fn unsupported_settings_are_not_planned() {
    let video_file = "video_preprocessor_config.json";
    for (name, file, changes) in [
        ("qwen3_vl", "config.json", json!({"model_type": "glm4v"})),
        ("qwen3_vl", video_file, json!({"video_processor_type": "Qwen2VLVideoProcessor"})),
        ("qwen3_vl", video_file, json!({"auto_map": {"AutoVideoProcessor": "x.Y"}})),
        ("qwen3_vl", video_file, json!({"patch_size": 14})),
        ("qwen3_vl", video_file, json!({"merge_size": 4})),
        ("qwen3_vl", video_file, json!({"do_resize": false})),
        ("qwen3_vl", video_file, json!({"resample": 2})),
        ("qwen3_vl", video_file, json!({"size": {"height": 224, "width": 224}})),
        ("qwen3_vl", video_file, json!({"fps": 0})),
        ("qwen3_vl", video_file, json!({"max_video_tokens": 1_u64 << 40})),
        ("qwen3_vl", "preprocessor_config.json", json!({"merge_size": 1})),
        (
            "qwen3_vl_image_file",
            "preprocessor_config.json",
            json!({"image_processor_type": "Qwen2VLImageProcessor"}),
        ),
        ("llava_onevision", video_file, json!({"do_sample_frames": true})),
        ("llava_onevision", video_file, json!({"do_resize": false})),
        ("llava_onevision", "config.json", json!({"vision_config": {"model_type": "other"}})),
        ("llava_next_video", "config.json", json!({"spatial_pool_stride": 0})),
    ] {
        let error = with_changes(name, file, changes.clone()).try_load();
        assert!(error.is_err(), "{name} {changes}");
    }
}

#[test]
fn unsupported_flags_are_not_planned() {
    for (name, flags) in [
        ("qwen2_vl", json!({"video_pruning_rate": 0.5})),
        ("llava_onevision", json!({"video_pruning_rate": 0.5})),
        ("qwen2_5_vl_evs", json!({"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"})),
        ("qwen3_vl", json!({"video_pruning_rate": 1.0})),
        ("qwen3_vl", json!({"mm_processor_kwargs": {"videos_kwargs": {}}})),
    ] {
        let mut model = video_goldens::models().remove(name).unwrap();
        model.flags = serde_json::from_value(flags.clone()).unwrap();
        assert!(model.try_load().is_err(), "{name} {flags}");
    }
}

#[test]
fn unknown_default_loader_matters_without_registered_one() {
    let dir = tempfile::tempdir().unwrap();
    for (name, is_planned) in [("qwen3_vl", true), ("llava_onevision", false)] {
        for (file, contents) in &video_goldens::models()[name].files {
            std::fs::write(dir.path().join(file), contents.to_string()).unwrap();
        }
        let default_loader = "opencv_dynamic".to_owned();
        let options = VideoOptions { default_loader, ..VideoOptions::default() };
        let loaded = VideoModel::from_model_dir(dir.path(), options);
        assert_eq!(loaded.is_ok(), is_planned, "{name}");
    }
}

#[test]
fn unsupported_kwargs_are_named() {
    let model = video_goldens::models()["qwen3_vl"].load();
    let empty = Map::new();
    for (kwargs, media_io, name) in [
        (json!({"fps": [1.0, 2.0]}), json!({}), "mm_processor_kwargs.fps"),
        (json!({"fps": 0}), json!({}), "mm_processor_kwargs.fps"),
        (json!({"num_frames": 1.5}), json!({}), "mm_processor_kwargs.num_frames"),
        (json!({"do_sample_frames": null}), json!({}), "mm_processor_kwargs.do_sample_frames"),
        (json!({"max_frames": 8}), json!({}), "mm_processor_kwargs.max_frames"),
        (json!({"videos_kwargs": {}}), json!({}), "mm_processor_kwargs.videos_kwargs"),
        (json!({}), json!({"backend": "torchcodec"}), "media_io_kwargs.video.backend"),
        (json!({}), json!({"video_backend": "glmga"}), "media_io_kwargs.video.video_backend"),
        (json!({}), json!({"video_backend": null}), "media_io_kwargs.video.video_backend"),
        (json!({}), json!({"frame_recovery": true}), "media_io_kwargs.video.frame_recovery"),
        (json!({}), json!({"num_frames": 8.0}), "media_io_kwargs.video.num_frames"),
        (json!({}), json!({"min_frames": 0}), "media_io_kwargs.video.min_frames"),
        (json!({}), json!({"fps": "2"}), "media_io_kwargs.video.fps"),
        (json!({}), json!({"device": "cuda"}), "media_io_kwargs.video.device"),
    ] {
        let error = model.parse_request(&object(&kwargs), &object(&media_io)).unwrap_err();
        assert!(error.to_string().starts_with(name), "{name}: {error}");
        assert!(["unknown_kwarg", "invalid_kwarg"].contains(&error.cause()), "{name}: {error:?}");
    }
    assert!(model.parse_request(&empty, &empty).is_ok());
}

#[test]
fn frames_over_pixel_limit_are_not_planned() {
    let model = video_goldens::models()["qwen2_vl"].load();
    let video = VideoProperties { frames: 100, fps: 25.0, width: 20_000, height: 10_000 };
    let result = model.plan(video, model.default_request());
    assert!(matches!(result, Err(VideoPlanError::Video { .. })));
}

#[test]
fn refused_settings_have_fingerprints_of_their_own() {
    let models = video_goldens::models();
    for (name, refused, planned) in [
        ("qwen2_vl", json!({"do_sample_frames": true}), json!({})),
        ("qwen3_vl", json!({"num_frames": 8, "fps": 2}), json!({"num_frames": 8})),
    ] {
        let model = models[name].load();
        // Every frame is loaded, so the processor of Qwen3-VL samples.
        let video = VideoProperties { frames: 20, fps: 1.0, width: 320, height: 240 };
        let plan = |kwargs: &Value| {
            let request = model.parse_request(&object(kwargs), &object(&json!({}))).unwrap();
            (model.plan(video, &request).is_ok(), model.fingerprint(&request))
        };
        let (is_refused_planned, refused) = plan(&refused);
        let (is_planned, planned) = plan(&planned);
        assert_eq!((is_refused_planned, is_planned), (false, true), "{name}");
        assert_ne!(refused, planned, "{name}");
    }
}

#[test]
fn fingerprint_changes_with_effective_settings_only() {
    let models = video_goldens::models();
    let model = models["qwen3_vl"].load();
    let default = model.fingerprint(model.default_request());
    let fingerprint = |kwargs: Value, media_io: Value| {
        let request = model.parse_request(&object(&kwargs), &object(&media_io)).unwrap();
        model.fingerprint(&request)
    };
    for (kwargs, media_io) in [
        (json!({"max_pixels": 100_000}), json!({})),
        (json!({"size": {"shortest_edge": 100}}), json!({})),
        (json!({"fps": 1}), json!({})),
        (json!({"num_frames": 8}), json!({})),
        (json!({"do_sample_frames": false}), json!({})),
        (json!({"cap_pixels_per_frame": true}), json!({})),
        (json!({}), json!({"fps": 1})),
        (json!({}), json!({"max_frames": 10})),
        (json!({}), json!({"min_frames": 10})),
        (json!({}), json!({"video_backend": "opencv"})),
    ] {
        assert_ne!(fingerprint(kwargs.clone(), media_io.clone()), default, "{kwargs} {media_io}");
    }
    for (kwargs, media_io) in [
        (json!({"fps": 2}), json!({})),
        (json!({"max_pixels": 25_165_824}), json!({})),
        (json!({"cap_pixels_per_frame": false}), json!({})),
        // The loader of Qwen3-VL ignores it.
        (json!({}), json!({"num_frames": 7})),
        (json!({}), json!({"max_frames": 1000, "fps": 2.0, "backend": "opencv"})),
    ] {
        assert_eq!(fingerprint(kwargs.clone(), media_io.clone()), default, "{kwargs} {media_io}");
    }
    let pruned = models["qwen3_vl_evs"].load();
    assert_ne!(pruned.fingerprint(pruned.default_request()), default);
}

proptest! {
    /// No properties cause a panic or an inconsistent plan.
    #[test]
    fn any_video_is_planned_consistently_or_refused(
        frames in prop_oneof![any::<u64>(), 0..200_000_u64],
        fps in prop_oneof![any::<f64>(), 0.1..100.0],
        width in prop_oneof![any::<u32>(), 0..5000_u32],
        height in prop_oneof![any::<u32>(), 0..5000_u32],
        name in prop::sample::select(vec![
            "qwen2_vl", "qwen2_5_vl_capped", "qwen3_vl", "qwen3_vl_capped", "llava_onevision",
            "llava_next_video",
        ]),
    ) {
        thread_local! {
            static MODELS: std::collections::BTreeMap<String, VideoModel> =
                video_goldens::models().into_iter().map(|(name, model)| (name, model.load()))
                    .collect();
        }
        let video = VideoProperties { frames, fps, width, height };
        let plan = MODELS.with(|models| {
            let model = &models[name];
            model.plan(video, model.default_request())
        });
        let Ok(plan) = plan else { return Ok(()) };
        prop_assert!(plan.loaded_frames.is_sorted_by(|a, b| a < b));
        prop_assert!(plan.frames.iter().all(|frame| *frame < frames));
        prop_assert!(plan.frames.iter().all(|frame| plan.loaded_frames.contains(frame)));
        prop_assert!(plan.tokens > 0 && plan.pixel_bytes(PixelFormat::RawU8) > 0);
    }
}
