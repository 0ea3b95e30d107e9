//! Videos for tests: a model that plans them, clips, and a scripted processor.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm_media::MediaInput;
use chiasm_processor::{ItemLimits, ProcessorOptions, Sandbox};
use chiasm_prompt::{ChatContent, ChatMessage, ChatPart};
use chiasm_request::{Chat, MediaRef, Prompt};
use chiasm_types::Modality;
use serde_json::json;

use super::MODEL;
use crate::VllmProcessorOptions;

/// The fork server of [`scripted_processor`].
const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/video_server.py");
const CLIPS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm-video/tests/clips");

/// Writes the demo's model to a folder, with settings and a template of videos.
///
/// # Panics
/// If that fails.
pub fn write_model(folder: &Path) {
    for file in std::fs::read_dir(MODEL).unwrap() {
        let path = file.unwrap().path();
        std::fs::copy(&path, folder.join(path.file_name().unwrap_or_default())).unwrap();
    }
    let template = folder.join("chat_template.jinja");
    let text = std::fs::read_to_string(&template).unwrap();
    let branch = "{%- elif part.type == 'text' -%}";
    assert!(text.contains(branch));
    let videos = "{%- elif part.type == 'video' -%}\n<|vision_start|><|video_pad|><|vision_end|>\n";
    std::fs::write(&template, text.replace(branch, &format!("{videos}{branch}"))).unwrap();
    let settings = json!({
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 3136, "longest_edge": 1_003_520},
    });
    std::fs::write(folder.join("video_preprocessor_config.json"), settings.to_string()).unwrap();
}

/// Reads a clip of `chiasm-video`.
///
/// # Panics
/// If there is no such clip.
pub fn clip(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(CLIPS).join(name)).unwrap()
}

/// Returns a conversation with one video.
pub fn video(clip: &[u8]) -> Prompt {
    let content = ChatContent::Parts(vec![
        ChatPart::Media(Modality::Video),
        ChatPart::Text("what is this?".to_owned()),
    ]);
    let message =
        ChatMessage { role: "user".to_owned(), content: Some(content), ..ChatMessage::default() };
    let url = format!("data:video/mp4;base64,{}", STANDARD.encode(clip));
    let media = MediaRef {
        modality: Modality::Video,
        source: Some(MediaInput::Url(url.into())),
        uuid: None,
        field: "messages[0].content[0].video_url".to_owned(),
    };
    Prompt::Chat(Chat {
        messages: vec![message],
        media: vec![media],
        add_generation_prompt: true,
        ..Chat::default()
    })
}

/// Returns the options of a processor that can't be started.
pub fn missing_processor(model: &Path) -> VllmProcessorOptions {
    VllmProcessorOptions {
        processor: ProcessorOptions {
            python: PathBuf::from("/nonexistent/python"),
            model: model.to_owned(),
            vllm_flags: Vec::new(),
            children: 1,
            queue: 8,
            timeout: Duration::from_secs(60),
            startup_timeout: Duration::from_secs(60),
            restart_pause: Duration::from_secs(5),
            item_bytes: 2 << 30,
            address_space: 0,
            limits: ItemLimits::default(),
            sandbox: Sandbox::Off,
        },
        other_pythons: Vec::new(),
        required: false,
        at_start: false,
        may_render_conversations: false,
        trust_request_kwargs: false,
        concurrent_videos: 2,
    }
}

/// Returns the options of a processor whose script behaves in this way.
pub fn scripted_processor(model: &Path, behaviour: &str) -> VllmProcessorOptions {
    let options = missing_processor(model);
    let vllm_flags = vec![behaviour.to_owned()];
    let processor =
        ProcessorOptions { python: PathBuf::from(SERVER), vllm_flags, ..options.processor };
    VllmProcessorOptions { processor, ..options }
}
