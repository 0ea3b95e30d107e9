//! What is said is what is heard, and what is malformed is refused.

use chiasm_backend::{Left, MediaForm, OwnAdapter, TensorFormat};
use chiasm_pipeline::ItemOrigin;
use chiasm_types::Dtype;
use serde_json::Map;

use super::*;
use crate::capabilities::{self, OfAgent};

#[test]
fn a_job_s_stage_is_the_same_at_the_other_end() {
    let left = Left::new(Bytes::from_static(b"where it is")).unwrap();
    for stage in [Stage::Whole, Stage::Encode, Stage::Prefill, Stage::Decode(left)] {
        let told = Job { stage, embedded: vec![MmHash::new([3; 32])], ..job(&[TokenId(3)]) };
        let heard = job::from_message(sent(&told)).unwrap();
        assert_eq!((heard.stage, heard.embedded), (told.stage, told.embedded));
    }
    let short = proto::Job { embedded: vec![vec![3; 31].into()], ..sent(&job(&[TokenId(3)])) };
    assert_eq!(job::from_message(short).unwrap_err().0, "embedded");
    let endless =
        proto::Job { left: vec![0; Left::MAX_BYTES + 1].into(), ..sent(&job(&[TokenId(3)])) };
    assert_eq!(job::from_message(endless).unwrap_err().0, "left");
}

#[test]
fn a_job_is_the_same_at_the_other_end() {
    let tokens = [3, 1, 2].map(TokenId);
    let constraints = [
        Constraint::JsonSchema("{}".into()),
        Constraint::JsonObject,
        Constraint::Regex("a".into()),
        Constraint::Grammar("root ::= \"a\"".into()),
        Constraint::StructuralTag("{}".into()),
    ];
    for constraint in constraints {
        let mut told = job(&tokens);
        told.sampling.structured = Some(Structured { constraint, field: "structured_outputs" });
        let mask = vec![true, false];
        told.media = Arc::new([JobItem {
            modality: Modality::Image,
            hash: MmHash::new([7; 32]),
            placeholder: Placeholder { offset: 1, length: 2, is_embed: Some(mask) },
            elements: 1,
            source: Arc::new(File::new(&Bytes::new(), ContentHash::new([8; 32]))),
        }]);
        let heard = job::from_message(sent(&told)).unwrap();
        assert_eq!(heard.tokens, tokens);
        assert_eq!((heard.id, heard.sampling), (told.id, told.sampling));
        assert_eq!(
            (heard.cache_salt, heard.priority, heard.trace),
            (told.cache_salt, told.priority, told.trace)
        );
        assert_eq!(heard.reasoning, told.reasoning);
        assert_eq!(heard.stage, told.stage);
        let [item] = &heard.media[..] else { panic!("one item") };
        let origin = ItemOrigin::File {
            content: ContentHash::new([8; 32]),
            processor_kwargs: Map::new(),
            url: None,
            size: None,
        };
        assert_eq!((item.hash, &item.origin), (told.media[0].hash, &origin));
        assert_eq!(item.placeholder, told.media[0].placeholder);
    }
}

#[test]
fn where_a_file_is_is_told_to_agents_that_fetch_alone() {
    let at = |url: &str| {
        let source =
            File { url: Some(url.into()), ..File::new(&Bytes::new(), ContentHash::new([8; 32])) };
        let mut told = job(&[TokenId(3)]);
        told.media = Arc::new([JobItem {
            modality: Modality::Image,
            hash: MmHash::new([7; 32]),
            placeholder: Placeholder { offset: 0, length: 1, is_embed: None },
            elements: 1,
            source: Arc::new(source),
        }]);
        told
    };
    let url_of =
        |message: proto::Job| match job::from_message(message).unwrap().media.remove(0).origin {
            ItemOrigin::File { url, .. } => url,
            ItemOrigin::Tensors { .. } => panic!("a file"),
        };
    let told = at("https://a/b");
    assert_eq!(url_of(sent(&told)).as_deref(), Some("https://a/b"));
    let media = job::MediaTold { urls: false, image_tensors: None };
    assert_eq!(url_of(job::to_message(&told, &[TokenId(3)], media).unwrap()), None);
    // Longer than servers take: it is sent.
    assert_eq!(url_of(sent(&at(&format!("https://a/{}", "b".repeat(8 << 10))))), None);
}

#[test]
fn adapters_are_the_same_at_the_other_end() {
    let own = |name: &str, refused: Option<&str>| OwnAdapter {
        name: name.to_owned(),
        root: "/adapters/a".to_owned(),
        stamp: [0, 1, 2, 3, 4, 5, 6, 255],
        refused: refused.map(str::to_owned),
    };
    let told = |adapters: Vec<OwnAdapter>| {
        let of_agent = OfAgent { life: 1, tensor_bytes: None, fetches_media: false, adapters };
        capabilities::to_message(&fake_capabilities(), of_agent)
    };
    let heard =
        capabilities::from_message(told(vec![own("a", None), own("b@c", Some("too large"))]), None)
            .unwrap();
    let expected = [
        ("a@00010203040506ff", own("a", None)),
        ("b@c@00010203040506ff", own("b@c", Some("too large"))),
    ];
    assert_eq!(heard.adapters, expected.map(|(name, own)| (name.to_owned(), own)).into());
    assert_eq!(heard.max_loras, 0, "it can't be made to load others");
    for wrong in ["", &"a".repeat(4097)] {
        assert!(
            capabilities::from_message(told(vec![own(wrong, None)]), None).is_none(),
            "{}",
            wrong.len()
        );
    }
}

#[test]
fn the_form_of_tensors_is_told_by_agents_that_take_them() {
    let heard = |media, tensor_bytes| {
        let of_agent =
            OfAgent { life: 1, tensor_bytes, fetches_media: false, adapters: Vec::new() };
        let ready =
            capabilities::to_message(&Capabilities { media, ..fake_capabilities() }, of_agent);
        (capabilities::image_tensors(&ready), ready.most_tensor_bytes)
    };
    for format in [
        TensorFormat::Raw,
        TensorFormat::Normalized(Dtype::BF16),
        TensorFormat::Normalized(Dtype::F32),
    ] {
        assert_eq!(heard(MediaForm::Tensors(format), Some(9)), (Some(format), 9));
        assert_eq!(heard(MediaForm::Tensors(format), None), (None, 0));
    }
    assert_eq!(heard(MediaForm::Encoded, Some(9)).0, None);
    // What nobody makes of images, or a later version names.
    let mut ready = crate::proto::Ready::default();
    for name in ["int64", "uint8", "float8"] {
        ready.image_tensors = name.to_owned();
        assert_eq!(capabilities::image_tensors(&ready), None, "{name}");
    }
}

#[test]
fn malformed_messages_are_refused_with_the_field() {
    let wrong = |change: &dyn Fn(&mut proto::Job)| {
        let mut message = sent(&job(&[TokenId(1), TokenId(2)]));
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
    };
    let with = |change: &dyn Fn(&mut proto::MediaItem)| {
        let mut item = item.clone();
        change(&mut item);
        wrong(&|message| message.media = vec![item.clone()])
    };
    assert_eq!(wrong(&|message| message.sampling = None), "sampling_params");
    assert_eq!(
        wrong(&|message| message.sampling.as_mut().unwrap().n = u32::MAX),
        "sampling_params"
    );
    assert_eq!(wrong(&|message| message.request_id = "a b".to_owned()), "request_id");
    assert_eq!(
        wrong(&|message| message.sampling.as_mut().unwrap().logit_bias.push(1.0)),
        "sampling_params"
    );
    assert_eq!(
        wrong(&|message| message.sampling.as_mut().unwrap().constraint = Some(Default::default())),
        "sampling_params"
    );
    assert_eq!(
        wrong(&|message| message.reasoning_variables[0].name = "x".to_owned()),
        "chat_template_kwargs"
    );
    assert_eq!(with(&|item| item.mm_hash = Bytes::from_static(&[1; 31])), "media[0]");
    assert_eq!(with(&|item| item.content = Bytes::from_static(&[1; 31])), "media[0]");
    assert_eq!(with(&|item| item.processor_kwargs = "[]".to_owned()), "media[0]");
    for elsewhere in [
        "file:///etc/passwd",
        "data:,x",
        "ftp://a/b",
        "a",
        &format!("http://a/{}", "b".repeat(8 << 10)),
    ] {
        assert_eq!(with(&|item| item.url = elsewhere.to_owned()), "media[0]");
    }
    assert_eq!(with(&|item| item.length = 3), "media[0]");
    assert_eq!(with(&|item| item.length = 0), "media[0]");
    assert_eq!(with(&|item| item.embeds = vec![u32::MAX, 3]), "media[0]");
}
