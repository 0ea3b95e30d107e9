//! Conversion to and from messages: values are preserved, and malformed messages are refused.

use chiasm_backend::{KvTransferParams, MediaForm, PreloadedAdapter, TensorFormat};
use chiasm_pipeline::ItemOrigin;
use chiasm_types::Dtype;
use serde_json::Map;

use super::*;
use crate::capabilities::{self, AgentFacts};

#[test]
fn stage_survives_the_wire() {
    let left = KvTransferParams::new(Bytes::from_static(b"where it is")).unwrap();
    for stage in [Stage::Whole, Stage::Encode, Stage::Prefill, Stage::Decode(left)] {
        let sent = Job { stage, embedded: vec![MmHash::new([3; 32])], ..job(&[TokenId(3)]) };
        let received = job::from_message(over_the_wire(&sent)).unwrap();
        assert_eq!((received.stage, received.embedded), (sent.stage, sent.embedded));
    }
    let message = over_the_wire(&job(&[TokenId(3)]));
    let short = proto::Job { embedded: vec![vec![3; 31].into()], ..message.clone() };
    assert_eq!(job::from_message(short).unwrap_err().0, "embedded");
    let too_long = proto::Job { left: vec![0; KvTransferParams::MAX_BYTES + 1].into(), ..message };
    assert_eq!(job::from_message(too_long).unwrap_err().0, "left");
}

#[test]
fn job_survives_the_wire() {
    let tokens = [3, 1, 2].map(TokenId);
    let constraints = [
        Constraint::JsonSchema("{}".into()),
        Constraint::JsonObject,
        Constraint::Regex("a".into()),
        Constraint::Grammar("root ::= \"a\"".into()),
        Constraint::StructuralTag("{}".into()),
    ];
    for constraint in constraints {
        let mut sent = job(&tokens);
        sent.sampling.structured = Some(Structured { constraint, field: "structured_outputs" });
        let mask = vec![true, false];
        sent.media = Arc::new([JobItem {
            modality: Modality::Image,
            hash: MmHash::new([7; 32]),
            placeholder: Placeholder { offset: 1, length: 2, is_embed: Some(mask) },
            elements: 1,
            source: Arc::new(File::new(&Bytes::new(), ContentHash::new([8; 32]))),
        }]);
        let received = job::from_message(over_the_wire(&sent)).unwrap();
        assert_eq!(received.tokens, tokens);
        assert_eq!((received.id, received.sampling), (sent.id, sent.sampling));
        assert_eq!(
            (received.cache_salt, received.priority, received.trace),
            (sent.cache_salt, sent.priority, sent.trace)
        );
        assert_eq!(received.reasoning, sent.reasoning);
        assert_eq!(received.stage, sent.stage);
        let [item] = &received.media[..] else { panic!("one item") };
        let origin = ItemOrigin::File {
            content: ContentHash::new([8; 32]),
            processor_kwargs: Map::new(),
            url: None,
            size: None,
        };
        assert_eq!((item.hash, &item.origin), (sent.media[0].hash, &origin));
        assert_eq!(item.placeholder, sent.media[0].placeholder);
    }
}

#[test]
fn url_is_sent_only_to_agents_that_fetch() {
    let with_url = |url: &str| {
        let source =
            File { url: Some(url.into()), ..File::new(&Bytes::new(), ContentHash::new([8; 32])) };
        let mut job = job(&[TokenId(3)]);
        job.media = Arc::new([JobItem {
            modality: Modality::Image,
            hash: MmHash::new([7; 32]),
            placeholder: Placeholder { offset: 0, length: 1, is_embed: None },
            elements: 1,
            source: Arc::new(source),
        }]);
        job
    };
    let url_of =
        |message: proto::Job| match job::from_message(message).unwrap().media.remove(0).origin {
            ItemOrigin::File { url, .. } => url,
            ItemOrigin::Tensors { .. } | ItemOrigin::Cut(_) => panic!("a file"),
        };
    let short = with_url("https://a/b");
    assert_eq!(url_of(over_the_wire(&short)).as_deref(), Some("https://a/b"));
    let media = job::MediaDetails { urls: false, image_tensors: None, cuts: NO_CUTS };
    assert_eq!(url_of(job::to_message(&short, &[TokenId(3)], media).unwrap()), None);
    // Some servers refuse URLs of this length, so the file is sent instead.
    let long = with_url(&format!("https://a/{}", "b".repeat(8 << 10)));
    assert_eq!(url_of(over_the_wire(&long)), None);
}

#[test]
fn adapters_survive_the_wire() {
    let adapter = |name: &str, refused: Option<&str>| PreloadedAdapter {
        name: name.to_owned(),
        root: "/adapters/a".to_owned(),
        stamp: [0, 1, 2, 3, 4, 5, 6, 255],
        refused: refused.map(str::to_owned),
    };
    let ready = |adapters: Vec<PreloadedAdapter>| {
        let facts = AgentFacts {
            life: 1,
            tensor_bytes: None,
            video_slots: None,
            fetches_media: false,
            adapters,
        };
        capabilities::to_message(&fake_capabilities(), facts)
    };
    let received = capabilities::from_message(
        ready(vec![adapter("a", None), adapter("b@c", Some("too large"))]),
        None,
    )
    .unwrap();
    let expected = [
        ("a@00010203040506ff", adapter("a", None)),
        ("b@c@00010203040506ff", adapter("b@c", Some("too large"))),
    ];
    assert_eq!(
        received.adapters,
        expected.map(|(name, adapter)| (name.to_owned(), adapter)).into()
    );
    assert_eq!(received.max_loras, 0, "frontends load no adapters at agents");
    for wrong in ["", &"a".repeat(4097)] {
        assert!(
            capabilities::from_message(ready(vec![adapter(wrong, None)]), None).is_none(),
            "{}",
            wrong.len()
        );
    }
}

#[test]
fn tensor_format_is_sent_only_by_agents_that_take_tensors() {
    let received = |media, tensor_bytes| {
        let facts = AgentFacts {
            life: 1,
            tensor_bytes,
            video_slots: None,
            fetches_media: false,
            adapters: Vec::new(),
        };
        let ready = capabilities::to_message(&Capabilities { media, ..fake_capabilities() }, facts);
        (capabilities::image_tensors(&ready), ready.most_tensor_bytes)
    };
    for format in [
        TensorFormat::Raw,
        TensorFormat::Normalized(Dtype::BF16),
        TensorFormat::Normalized(Dtype::F32),
    ] {
        assert_eq!(received(MediaForm::Tensors(format), Some(9)), (Some(format), 9));
        assert_eq!(received(MediaForm::Tensors(format), None), (None, 0));
    }
    assert_eq!(received(MediaForm::Encoded, Some(9)).0, None);
    // Images never become tensors of the first two types. A later version may name the third.
    let mut ready = crate::proto::Ready::default();
    for name in ["int64", "uint8", "float8"] {
        ready.image_tensors = name.to_owned();
        assert_eq!(capabilities::image_tensors(&ready), None, "{name}");
    }
}

#[test]
fn malformed_messages_are_refused_with_the_field() {
    let job_fault = |change: &dyn Fn(&mut proto::Job)| {
        let mut message = over_the_wire(&job(&[TokenId(1), TokenId(2)]));
        change(&mut message);
        job::from_message(message).unwrap_err().0
    };
    let item = proto::MediaItem {
        modality: "image".to_owned(),
        mm_hash: Bytes::from_static(&[1; 32]),
        content: Bytes::from_static(&[1; 32]),
        processor_kwargs: "{}".to_owned(),
        offset: 0,
        length: 2,
        embeds: vec![1, 1],
        elements: 0,
        url: String::new(),
        width: 0,
        height: 0,
        video: None,
    };
    let item_fault = |change: &dyn Fn(&mut proto::MediaItem)| {
        let mut item = item.clone();
        change(&mut item);
        job_fault(&|message| message.media = vec![item.clone()])
    };
    assert_eq!(job_fault(&|message| message.sampling = None), "sampling_params");
    assert_eq!(
        job_fault(&|message| message.sampling.as_mut().unwrap().n = u32::MAX),
        "sampling_params"
    );
    assert_eq!(job_fault(&|message| message.request_id = "a b".to_owned()), "request_id");
    assert_eq!(
        job_fault(&|message| message.sampling.as_mut().unwrap().logit_bias.push(1.0)),
        "sampling_params"
    );
    assert_eq!(
        job_fault(
            &|message| message.sampling.as_mut().unwrap().constraint = Some(Default::default())
        ),
        "sampling_params"
    );
    assert_eq!(
        job_fault(&|message| message.reasoning_variables[0].name = "x".to_owned()),
        "chat_template_kwargs"
    );
    assert_eq!(item_fault(&|item| item.mm_hash = Bytes::from_static(&[1; 31])), "media[0]");
    assert_eq!(item_fault(&|item| item.content = Bytes::from_static(&[1; 31])), "media[0]");
    assert_eq!(item_fault(&|item| item.processor_kwargs = "[]".to_owned()), "media[0]");
    for url in [
        "file:///etc/passwd",
        "data:,x",
        "ftp://a/b",
        "a",
        &format!("http://a/{}", "b".repeat(8 << 10)),
    ] {
        assert_eq!(item_fault(&|item| item.url = url.to_owned()), "media[0]");
    }
    let video =
        proto::Video { frames: 60, fps: 29.97, width: 160, height: 96, io_kwargs: "{}".to_owned() };
    let changes: [&dyn Fn(&mut proto::Video); 6] = [
        &|video| video.frames = 0,
        &|video| video.fps = 0.0,
        &|video| video.fps = f64::NAN,
        &|video| video.fps = f64::INFINITY,
        &|video| video.width = 0,
        &|video| video.height = 0,
    ];
    for change in changes {
        let mut video = video.clone();
        change(&mut video);
        assert_eq!(item_fault(&|item| item.video = Some(video.clone())), "media[0]", "{video:?}");
    }
    assert_eq!(item_fault(&|item| item.length = 3), "media[0]");
    assert_eq!(item_fault(&|item| item.length = 0), "media[0]");
    assert_eq!(item_fault(&|item| item.embeds = vec![u32::MAX, 3]), "media[0]");
}
