//! Tests of the flags in all their spellings.

use super::*;

fn parse(args: &[&str]) -> Result<VllmFlags, String> {
    let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
    VllmFlags::parse(&args).map_err(|error| error.to_string())
}

fn kwargs(args: &[&str]) -> Value {
    Value::Object(parse(args).unwrap().processor_kwargs)
}

#[test]
fn engine_only_flag_is_found() {
    let found = |args: &[&str]| {
        first_engine_only_flag(&args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>())
    };
    assert_eq!(found(&["--trust_remote_code", "--mm-processor-kwargs.max_pixels", "1"]), None);
    assert_eq!(
        found(&["--revision=v1", "--max_model_len", "4096", "--dtype", "half"]),
        Some("--max-model-len".into())
    );
    assert_eq!(found(&["-tp", "2"]), Some("--tensor-parallel-size".into()));
}

#[test]
fn foreign_model_code_is_detected() {
    let foreign = |args: &[&str]| parse(args).unwrap().foreign_model;
    assert!(foreign(&["--model-impl", "transformers"]));
    assert!(foreign(&["--model_impl=terratorch"]));
    assert!(!foreign(&["--model-impl", "vllm"]));
    assert!(!foreign(&["--model-impl=auto", "--model", "transformers"]));
}

#[test]
fn format_flags_ignore_similar_flags() {
    let parsed = |args: &[&str]| {
        let VllmFlags { config_format, tokenizer_mode, .. } = parse(args).unwrap();
        (config_format, tokenizer_mode)
    };
    let pair = |format: &str, mode: &str| (format.to_owned(), mode.to_owned());
    assert_eq!(
        parsed(&["--tokenizer", "mistral", "--tokenizer-revision", "x"]),
        pair("auto", "auto")
    );
    assert_eq!(parsed(&["--tokenizer_mode=HF", "--config-f", "mistral"]), pair("mistral", "hf"));
    assert_eq!(parsed(&["--tokenizer-m", "deepseek_v32"]), pair("auto", "deepseek_v32"));
}

#[test]
fn hub_flags_are_parsed_in_each_spelling() {
    let parsed = |args: &[&str]| {
        let VllmFlags { trust_remote_code, load_format, has_revision, .. } = parse(args).unwrap();
        (trust_remote_code, load_format, has_revision)
    };
    assert_eq!(
        parsed(&["--trust_remote_code", "--load-format=mistral"]),
        (true, "mistral".to_owned(), false)
    );
    assert_eq!(
        parsed(&["--trust-remote", "--no-trust-remote-code", "--rev=v1"]),
        (false, "auto".to_owned(), true)
    );
    assert_eq!(
        parsed(&["--tokenizer-revision", "x", "--code-revision=y"]),
        (false, "auto".to_owned(), false)
    );
}

#[test]
fn processor_kwargs_are_parsed_in_each_spelling() {
    let expected = json!({"max_pixels": 50000});
    for args in [
        &["--mm-processor-kwargs", r#"{"max_pixels": 50000}"#][..],
        &[
            "--dtype",
            "float32",
            r#"--mm-processor-kwargs={"max_pixels": 50000}"#,
            "--enforce-eager",
        ],
        &["--mm_processor_kwargs", r#"{"max_pixels": 50000}"#],
        &["--mm-processor-k", r#"{"max_pixels": 50000}"#],
        &["--mm-processor-kwargs.max_pixels", "50000"],
        &["--mm_processor_kwargs.max_pixels=50000"],
    ] {
        assert_eq!(kwargs(args), expected, "{args:?}");
    }
}

#[test]
fn other_flags_leave_defaults() {
    for args in [
        &[][..],
        &[
            "--dtype",
            "float32",
            "-tp",
            "2",
            "--max-model-len=4096",
            "--compilation-config.mode",
            "3",
        ],
        &["--mm-encoder-tp-mode", "data", "--mm-processor-kwargs", "None"],
        &["--mm-processor-kwargs", "{}", "--media-io-kwargs", "{}"],
    ] {
        assert_eq!(parse(args).unwrap(), VllmFlags::default(), "{args:?}");
    }
}

#[test]
fn kind_limited_to_zero_is_not_accepted() {
    let accepted = |args: &[&str]| {
        let AcceptedMedia { images, videos } = parse(args).unwrap().accepted_media();
        (images, videos)
    };
    assert_eq!(accepted(&[]), (true, true));
    assert_eq!(accepted(&["--limit-mm-per-prompt", r#"{"image": 4, "video": 0}"#]), (true, false));
    assert_eq!(accepted(&["--limit-mm-per-prompt.video=0"]), (true, false));
    assert_eq!(accepted(&["--limit_mm_per_prompt.image.count", "0"]), (false, true));
    assert_eq!(accepted(&["--limit-mm", r#"{"image": {"count": 2, "width": 9}}"#]), (true, true));
    assert_eq!(accepted(&["--language-model-only"]), (false, false));
    assert_eq!(accepted(&["--language-model-only", "--no-language-model-only"]), (true, true));
}

#[test]
fn keys_given_one_by_one_are_merged() {
    let args = [
        "--mm-processor-kwargs.size.shortest_edge",
        "9",
        "--mm-processor-kwargs.size.longest_edge=10",
        "--mm-processor-kwargs.do_resize",
        "true",
        "--mm-processor-kwargs.max_pixels",
        "1M",
    ];
    let size = json!({"shortest_edge": 9, "longest_edge": 10});
    assert_eq!(kwargs(&args), json!({"size": size, "do_resize": true, "max_pixels": "1M"}));
}

#[test]
fn missing_or_ambiguous_value_error_names_flag() {
    for args in [
        &["--mm-processor-kwargs"][..],
        &["--mm-processor-kwargs.size"],
        &["--mm-processor-kwargs", "min_pixels=3"],
        &["--mm-processor-kwargs", "[1]"],
        &["--mm-processor-kwargs", r#"{"a": 1}"#, "--mm-processor-kwargs", r#"{"a": 1}"#],
        &["--mm-processor-kwargs", r#"{"a": 1}"#, "--mm-processor-kwargs.b", "1"],
        &["--mm-processor-kwargs.b", "1", "--mm-processor-kwargs", r#"{"a": 1}"#],
        &["--mm-processor-kwargs.b", "1", "--mm-processor-kwargs.b", "2"],
        &["--mm-processor-kwargs.b", "1", "--mm-processor-kwargs.b.c", "2"],
    ] {
        let error = parse(args).unwrap_err();
        assert!(error.starts_with("--mm-processor-kwargs"), "{args:?}: {error}");
    }
}

#[test]
fn media_io_kwargs_that_change_images_are_refused() {
    for (value, name) in [
        (r#"{"image": {"rgba_background_color": [0, 0, 0]}}"#, "image.rgba_background_color"),
        (r#"{"image": {"image_mode": null}}"#, "image.image_mode"),
        (r#"{"image": {"loader": "x"}}"#, "image.loader"),
        (r#"{"image": 1}"#, "image"),
        (r#"{"vision_chunk": {}}"#, "vision_chunk"),
        ("1", "not a JSON object"),
    ] {
        let error = parse(&["--media-io-kwargs", value]).unwrap_err();
        assert!(
            error.starts_with("--media-io-kwargs after --") && error.contains(name),
            "{value}: {error}"
        );
    }
    assert!(parse(&["--media_io_kwargs.image.rgba_background_color", "[0, 0, 0]"]).is_err());
    for value in [
        r#"{"video": {"num_frames": 40}, "audio": {"x": 1}, "image": {}}"#,
        r#"{"image": {"image_mode": "RGB", "rgba_background_color": [255, 255, 255]}}"#,
    ] {
        assert!(parse(&["--media-io-kwargs", value]).is_ok(), "{value}");
    }
}

#[test]
fn video_settings_are_parsed() {
    let flags = parse(&["--media-io-kwargs.video.num_frames", "8"]).unwrap();
    assert_eq!(Value::Object(flags.video_io_kwargs), json!({"num_frames": 8}));
    assert!(parse(&["--media-io-kwargs", r#"{"video": 1}"#]).is_err());
    let pruning = |args: &[&str]| parse(args).unwrap().video_pruning;
    let rate = 0.75;
    let evs = Some(VideoPruning { method: PruningMethod::Evs, rate });
    assert_eq!(pruning(&["--video-pruning-rate", "0.75"]), evs);
    let vidcom2 = Some(VideoPruning { method: PruningMethod::VidCom2, rate });
    assert_eq!(pruning(&["--video_pruning_method=vidcom2", "--video-pruning-rate=0.75"]), vidcom2);
    for off in ["0", "0.0", "None"] {
        assert_eq!(pruning(&["--video-pruning-rate", off]), None, "{off}");
    }
    for invalid in ["1", "-0.1", "nan", "half"] {
        assert!(parse(&["--video-pruning-rate", invalid]).is_err(), "{invalid}");
    }
    assert!(parse(&["--video-pruning-method", "other"]).is_err());
}

#[test]
fn video_limit_is_parsed() {
    let limit = |args: &[&str]| parse(args).unwrap().max_videos();
    assert_eq!(limit(&[]), 999);
    assert_eq!(limit(&["--limit-mm-per-prompt", r#"{"video": 2}"#]), 2);
    assert_eq!(limit(&["--limit-mm-per-prompt.video", r#"{"count": 3, "width": 64}"#]), 3);
    assert_eq!(limit(&["--limit-mm-per-prompt", r#"{"image": 2}"#]), 999);
    assert_eq!(limit(&["--language-model-only"]), 0);
}

#[test]
fn normalize_flag_is_parsed_in_each_spelling() {
    for (args, normalize) in [
        (&["--no-mm-device-do-normalize"][..], false),
        (&["--no_mm_device_do_normalize"], false),
        (&["--no-mm-device"], false),
        (&["--mm-device-do-normalize"], true),
        (&["--no-mm-device-do-normalize", "--mm-device-do-normalize"], true),
    ] {
        assert_eq!(parse(args).unwrap().normalize, normalize, "{args:?}");
    }
}

#[test]
fn config_file_with_applied_flag_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vllm.yaml");
    let read_file = |text: &str| {
        std::fs::write(&file, text).unwrap();
        parse(&["--config", file.to_str().unwrap()])
    };
    for text in [
        "mm-processor-kwargs:\n  max_pixels: 3\n",
        "dtype: float32\nmm_processor_kwargs: '{}'\n",
        "{\"dtype\": \"float32\", \"media-io-kwargs\" : {}}",
        "mm-processor-kwargs.max_pixels: 3",
        "mm-processor-kw: {}",
        "mm-device-do-normalize: false",
        "video_pruning_rate: 0.5",
        "model_impl: transformers",
        "tokenizer-mode: mistral",
        "no-mm-device-do-normalize: true",
    ] {
        let error = read_file(text).unwrap_err();
        assert!(error.contains("vllm.yaml is not read by Chiasm: give --"), "{text}: {error}");
    }
    let harmless =
        "# grüße\ndtype: float32\nallowed-local-media-path: /mnt/media\nmax-model-len: 4096\n";
    assert!(read_file(harmless).is_ok());
    std::fs::remove_file(&file).unwrap();
    assert!(parse(&["--config", file.to_str().unwrap()]).unwrap_err().contains("vllm.yaml"));
    assert!(parse(&["--config"]).unwrap_err().contains("--config needs a value"));
}
