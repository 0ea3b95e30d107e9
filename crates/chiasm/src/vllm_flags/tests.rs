//! What the flags say, in every spelling.

use super::*;

fn read(args: &[&str]) -> Result<VllmFlags, String> {
    let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
    VllmFlags::read(&args).map_err(|error| error.to_string())
}

fn kwargs(args: &[&str]) -> Value {
    Value::Object(read(args).unwrap().processor_kwargs)
}

#[test]
fn what_only_engines_could_heed_is_found() {
    let found = |args: &[&str]| {
        for_engines_alone(&args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>())
    };
    assert_eq!(found(&["--trust_remote_code", "--mm-processor-kwargs.max_pixels", "1"]), None);
    assert_eq!(
        found(&["--revision=v1", "--max_model_len", "4096", "--dtype", "half"]),
        Some("--max-model-len".into())
    );
}

#[test]
fn models_that_are_not_vllms_own_are_told_apart() {
    let foreign = |args: &[&str]| read(args).unwrap().foreign_model;
    assert!(foreign(&["--model-impl", "transformers"]));
    assert!(foreign(&["--model_impl=terratorch"]));
    assert!(!foreign(&["--model-impl", "vllm"]));
    assert!(!foreign(&["--model-impl=auto", "--model", "transformers"]));
}

#[test]
fn who_reads_the_model_and_writes_its_conversations_is_said_in_every_spelling() {
    let said = |args: &[&str]| {
        let VllmFlags { config_format, tokenizer_mode, .. } = read(args).unwrap();
        (config_format, tokenizer_mode)
    };
    let pair = |format: &str, mode: &str| (format.to_owned(), mode.to_owned());
    assert_eq!(
        said(&["--tokenizer", "mistral", "--tokenizer-revision", "x"]),
        pair("auto", "auto")
    );
    assert_eq!(said(&["--tokenizer_mode=HF", "--config-f", "mistral"]), pair("mistral", "hf"));
    assert_eq!(said(&["--tokenizer-m", "deepseek_v32"]), pair("auto", "deepseek_v32"));
}

#[test]
fn what_is_fetched_of_a_model_on_the_hub_is_said_in_every_spelling() {
    let said = |args: &[&str]| {
        let VllmFlags { trust_remote_code, load_format, has_revision, .. } = read(args).unwrap();
        (trust_remote_code, load_format, has_revision)
    };
    assert_eq!(
        said(&["--trust_remote_code", "--load-format=mistral"]),
        (true, "mistral".to_owned(), false)
    );
    assert_eq!(
        said(&["--trust-remote", "--no-trust-remote-code", "--rev=v1"]),
        (false, "auto".to_owned(), true)
    );
    assert_eq!(
        said(&["--tokenizer-revision", "x", "--code-revision=y"]),
        (false, "auto".to_owned(), false)
    );
}

#[test]
fn processor_kwargs_are_found_in_every_spelling() {
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
fn other_flags_say_nothing() {
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
        assert_eq!(read(args).unwrap(), VllmFlags::default(), "{args:?}");
    }
}

#[test]
fn kinds_that_a_prompt_may_have_none_of_are_not_taken() {
    let taken = |args: &[&str]| {
        let TakenKinds { images, videos } = read(args).unwrap().taken_kinds();
        (images, videos)
    };
    assert_eq!(taken(&[]), (true, true));
    assert_eq!(taken(&["--limit-mm-per-prompt", r#"{"image": 4, "video": 0}"#]), (true, false));
    assert_eq!(taken(&["--limit-mm-per-prompt.video=0"]), (true, false));
    assert_eq!(taken(&["--limit_mm_per_prompt.image.count", "0"]), (false, true));
    assert_eq!(taken(&["--limit-mm", r#"{"image": {"count": 2, "width": 9}}"#]), (true, true));
    assert_eq!(taken(&["--language-model-only"]), (false, false));
    assert_eq!(taken(&["--language-model-only", "--no-language-model-only"]), (true, true));
}

#[test]
fn keys_given_one_by_one_come_together() {
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
fn a_flag_without_one_clear_value_is_refused_by_name() {
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
        let error = read(args).unwrap_err();
        assert!(error.starts_with("--mm-processor-kwargs"), "{args:?}: {error}");
    }
}

#[test]
fn media_io_kwargs_that_would_change_an_image_are_refused_by_name() {
    for (value, name) in [
        (r#"{"image": {"rgba_background_color": [0, 0, 0]}}"#, "image.rgba_background_color"),
        (r#"{"image": {"image_mode": null}}"#, "image.image_mode"),
        (r#"{"image": {"loader": "x"}}"#, "image.loader"),
        (r#"{"image": 1}"#, "image"),
        (r#"{"vision_chunk": {}}"#, "vision_chunk"),
        ("1", "no JSON object"),
    ] {
        let error = read(&["--media-io-kwargs", value]).unwrap_err();
        assert!(
            error.starts_with("--media-io-kwargs after --") && error.contains(name),
            "{value}: {error}"
        );
    }
    assert!(read(&["--media_io_kwargs.image.rgba_background_color", "[0, 0, 0]"]).is_err());
    for value in [
        r#"{"video": {"num_frames": 40}, "audio": {"x": 1}, "image": {}}"#,
        r#"{"image": {"image_mode": "RGB", "rgba_background_color": [255, 255, 255]}}"#,
    ] {
        assert!(read(&["--media-io-kwargs", value]).is_ok(), "{value}");
    }
}

#[test]
fn who_normalises_is_said_in_every_spelling() {
    for (args, normalize) in [
        (&["--no-mm-device-do-normalize"][..], false),
        (&["--no_mm_device_do_normalize"], false),
        (&["--no-mm-device"], false),
        (&["--mm-device-do-normalize"], true),
        (&["--no-mm-device-do-normalize", "--mm-device-do-normalize"], true),
    ] {
        assert_eq!(read(args).unwrap().normalize, normalize, "{args:?}");
    }
}

#[test]
fn a_configuration_with_these_flags_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vllm.yaml");
    let read_file = |text: &str| {
        std::fs::write(&file, text).unwrap();
        read(&["--config", file.to_str().unwrap()])
    };
    for text in [
        "mm-processor-kwargs:\n  max_pixels: 3\n",
        "dtype: float32\nmm_processor_kwargs: '{}'\n",
        "{\"dtype\": \"float32\", \"media-io-kwargs\" : {}}",
        "mm-processor-kwargs.max_pixels: 3",
        "mm-processor-kw: {}",
        "mm-device-do-normalize: false",
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
    assert!(read(&["--config", file.to_str().unwrap()]).unwrap_err().contains("vllm.yaml"));
    assert!(read(&["--config"]).unwrap_err().contains("--config needs a value"));
}
