use std::sync::Arc;

use bytes::Bytes;
use chiasm_types::{Dtype, Placeholder};
use proptest::prelude::*;

use super::*;
use crate::wire::MmField;

fn engine() -> EngineReady {
    EngineReady { max_model_len: 100, ..EngineReady::default() }
}

fn options() -> ClientOptions {
    let counted_rows =
        vec![CountedRows { rows_of: "pixel_values".into(), grid: "image_grid_thw".into() }];
    ClientOptions { vocab_size: Some(1000), counted_rows, ..ClientOptions::default() }
}

fn text() -> EngineCoreRequest {
    EngineCoreRequest {
        request_id: "a".into(),
        prompt_token_ids: Arc::new((0..50).map(TokenId).collect()),
        ..EngineCoreRequest::default()
    }
}

fn tensor(dtype: Dtype, shape: &[usize]) -> WireTensor {
    let len = shape.iter().product::<usize>() * dtype.size();
    WireTensor::new(dtype, shape.to_vec(), Bytes::from(vec![0; len])).unwrap()
}

fn grid_of(extents: [i64; 3]) -> WireTensor {
    let bytes: Vec<u8> = extents.iter().flat_map(|extent| extent.to_le_bytes()).collect();
    WireTensor::new(Dtype::I64, vec![3], bytes.into()).unwrap()
}

fn item(rows: usize, grid: [i64; 3]) -> MmItem {
    MmItem(vec![
        ("pixel_values".into(), MmField::flat(tensor(Dtype::U8, &[rows, 12]), rows)),
        ("image_grid_thw".into(), MmField::batched(grid_of(grid), true)),
    ])
}

fn feature(offset: usize, length: usize) -> MmFeature {
    MmFeature {
        data: Some(item(16, [1, 4, 4])),
        modality: "image".into(),
        identifier: "h".into(),
        position: Placeholder { offset, length, is_embed: None },
        mm_hash: None,
    }
}

/// Returns the field for which a request is refused.
fn refused(request: &EngineCoreRequest) -> Option<String> {
    refused_with(request, &options())
}

fn refused_with(request: &EngineCoreRequest, options: &ClientOptions) -> Option<String> {
    match check(request, &engine(), options) {
        Ok(()) => None,
        Err(EngineError::InvalidRequest { field, .. }) => Some(field),
        Err(other) => panic!("{other}"),
    }
}

fn with(change: impl FnOnce(&mut EngineCoreRequest)) -> Option<String> {
    let mut request = text();
    request.mm_features = vec![feature(3, 4), feature(7, 4)];
    assert_eq!(refused(&request), None);
    change(&mut request);
    refused(&request)
}

fn with_params(change: impl FnOnce(&mut SamplingParams)) -> Option<String> {
    with(|request| change(&mut request.sampling_params))
}

#[test]
fn prompt_bounds_are_checked() {
    let tokens = |count, token| {
        with(|request| {
            request.mm_features.clear();
            request.prompt_token_ids = Arc::new(vec![TokenId(token); count]);
        })
    };
    assert_eq!(tokens(99, 999), None);
    for (count, token) in [(0, 0), (100, 0), (101, 0), (10, 1000)] {
        assert_eq!(tokens(count, token).as_deref(), Some("prompt_token_ids"), "{count} × {token}");
    }
}

#[test]
fn unknown_vocabulary_accepts_any_token() {
    let mut request = text();
    Arc::make_mut(&mut request.prompt_token_ids)[0] = TokenId(u32::MAX);
    assert_eq!(refused_with(&request, &ClientOptions::default()), None);
}

#[test]
fn other_request_fields_are_checked() {
    assert_eq!(with(|request| request.request_id.clear()).as_deref(), Some("request_id"));
    assert_eq!(with(|request| request.arrival_time = f64::NAN).as_deref(), Some("arrival_time"));
    assert_eq!(with(|request| request.client_index = 1).as_deref(), Some("client_index"));
}

#[test]
fn undecodable_sampling_parameters_are_refused() {
    type Change = fn(&mut SamplingParams);
    let changes: [(&str, Change); 26] = [
        ("max_tokens", |params| params.max_tokens = 0),
        ("min_tokens", |params| params.min_tokens = params.max_tokens + 1),
        ("temperature", |params| params.temperature = -0.1),
        ("temperature", |params| params.temperature = 2.1),
        ("temperature", |params| params.temperature = f64::NAN),
        ("temperature", |params| params.temperature = f64::INFINITY),
        ("top_p", |params| params.top_p = 0.0),
        ("top_p", |params| params.top_p = 1.1),
        ("top_p", |params| params.top_p = f64::NAN),
        ("top_k", |params| params.top_k = -2),
        ("min_p", |params| params.min_p = -0.1),
        ("min_p", |params| params.min_p = 1.1),
        ("presence_penalty", |params| params.presence_penalty = 2.1),
        ("presence_penalty", |params| params.presence_penalty = f64::NAN),
        ("frequency_penalty", |params| params.frequency_penalty = -2.1),
        ("repetition_penalty", |params| params.repetition_penalty = 0.0),
        ("repetition_penalty", |params| params.repetition_penalty = f64::INFINITY),
        ("logprobs", |params| params.logprobs = Some(-2)),
        ("prompt_logprobs", |params| params.prompt_logprobs = Some(-2)),
        ("stop_token_ids", |params| params.stop_token_ids = vec![TokenId(1000)]),
        ("_all_stop_token_ids", |params| params.all_stop_token_ids = vec![TokenId(1000)]),
        ("_eos_token_id", |params| params.eos_token_id = Some(TokenId(1000))),
        ("allowed_token_ids", |params| params.allowed_token_ids = vec![TokenId(1000)]),
        ("logit_bias", |params| params.logit_bias = vec![(TokenId(1000), 1.0)]),
        ("logit_bias", |params| params.logit_bias = vec![(TokenId(1), f64::NAN)]),
        ("max_tokens", |params| {
            params.max_tokens = 0;
            params.min_tokens = 0;
        }),
    ];
    for (field, change) in changes {
        assert_eq!(with_params(change), Some(format!("sampling_params.{field}")));
    }
}

#[test]
fn bounds_of_ranges_pass() {
    let change = |params: &mut SamplingParams| {
        params.temperature = 2.0;
        params.presence_penalty = -2.0;
        params.frequency_penalty = 2.0;
        params.top_p = 1.0;
        params.top_k = -1;
        params.min_p = 1.0;
        params.max_tokens = 1;
        params.min_tokens = 1;
        params.logprobs = Some(-1);
        params.prompt_logprobs = Some(0);
    };
    assert_eq!(with_params(change), None);
}

#[test]
fn placeholders_are_within_prompt_in_order() {
    let position = |index: usize, offset, length| {
        with(|request| {
            request.mm_features[index].position = Placeholder { offset, length, is_embed: None }
        })
    };
    assert_eq!(position(1, 46, 4), None);
    for (offset, length) in [(47, 4), (6, 4), (7, 0), (usize::MAX, 2), (50, 1)] {
        assert_eq!(
            position(1, offset, length).as_deref(),
            Some("mm_features[1].mm_position"),
            "{offset}"
        );
    }
    assert_eq!(position(0, 8, 2).as_deref(), Some("mm_features[1].mm_position"), "out of order");
}

#[test]
fn placeholders_share_only_tokens_that_embed_nothing() {
    let mut request = text();
    request.mm_features = vec![feature(5, 4), feature(8, 4)];
    assert_eq!(refused(&request).as_deref(), Some("mm_features[1].mm_position"));
    // Gemma 3: a line break ends one item and begins the next.
    for feature in &mut request.mm_features {
        feature.position.is_embed = Some(vec![false, true, true, false]);
    }
    assert_eq!(refused(&request), None);
    request.mm_features[1].position.offset = 6;
    assert_eq!(refused(&request).as_deref(), Some("mm_features[1].mm_position"));
}

#[test]
fn interleaved_items_share_a_range() {
    let masks = |masks: [[bool; 4]; 2], next: usize| {
        let mut request = text();
        request.mm_features = vec![feature(5, 4), feature(5, 4), feature(next, 4)];
        for (feature, mask) in request.mm_features.iter_mut().zip(masks) {
            feature.position.is_embed = Some(mask.to_vec());
        }
        refused(&request)
    };
    let video = [false, true, false, true];
    let sound = [true, false, true, false];
    assert_eq!(masks([video, sound], 9), None);
    assert_eq!(masks([video, sound], 8).as_deref(), Some("mm_features[2].mm_position"));
    assert_eq!(
        masks([video, [true, true, false, false]], 9).as_deref(),
        Some("mm_features[1].mm_position")
    );
}

#[test]
fn is_embed_mask_covers_placeholder() {
    let mask = |mask: &[bool]| {
        let mask = mask.to_vec();
        with(|request| request.mm_features[0].position.is_embed = Some(mask))
    };
    assert_eq!(mask(&[false, true, true, false]), None);
    for wrong in [&[true; 3][..], &[true; 5], &[false; 4]] {
        assert_eq!(mask(wrong).as_deref(), Some("mm_features[0].mm_position"));
    }
}

#[test]
fn missing_data_needs_receiver_cache() {
    let mut request = text();
    request.mm_features = vec![MmFeature { data: None, ..feature(0, 4) }];
    assert_eq!(refused(&request).as_deref(), Some("mm_features[0].data"));
    assert_eq!(
        refused_with(&request, &ClientOptions { receiver_cache_bytes: Some(1 << 20), ..options() }),
        None
    );
}

#[test]
fn rows_must_match_grid() {
    let data = |item| with(|request| request.mm_features[1].data = Some(item));
    assert_eq!(data(item(24, [2, 3, 4])), None);
    for (rows, grid) in [
        (16, [1, 4, 5]),
        (15, [1, 4, 4]),
        (0, [0, 4, 4]),
        (16, [-1, -4, 4]),
        (16, [i64::MAX, 4, 4]),
    ] {
        assert_eq!(
            data(item(rows, grid)).as_deref(),
            Some("mm_features[1].pixel_values"),
            "{rows} {grid:?}"
        );
    }
    let mut no_pixels = item(16, [1, 4, 4]);
    no_pixels.0.remove(0);
    assert_eq!(data(no_pixels).as_deref(), Some("mm_features[1].pixel_values"));
    let mut flat_grid = item(16, [1, 4, 4]);
    flat_grid.0[1].1 = MmField::batched(tensor(Dtype::I64, &[2]), true);
    assert_eq!(data(flat_grid).as_deref(), Some("mm_features[1].image_grid_thw"));
    assert_eq!(data(MmItem::default()).as_deref(), Some("mm_features[1].data"));
}

#[test]
fn tensor_bytes_must_match_shape() {
    let pixels = |change: fn(&mut MmField)| {
        with(|request| {
            let item = request.mm_features[0].data.as_mut().unwrap();
            change(&mut item.0[0].1);
        })
    };
    let field = Some("mm_features[0].pixel_values");
    assert_eq!(pixels(|field| field.data = None).as_deref(), field);
    assert_eq!(
        pixels(|field| {
            let mut short = tensor(Dtype::U8, &[16, 12]);
            short.data = TensorData::Bytes(Bytes::from_static(b"short"));
            field.data = Some(MmData::Tensor(short));
        })
        .as_deref(),
        field
    );
    assert_eq!(
        pixels(|field| {
            let mut huge = tensor(Dtype::U8, &[16, 12]);
            huge.shape = vec![usize::MAX, 2];
            field.data = Some(MmData::Tensor(huge));
        })
        .as_deref(),
        field
    );
    assert_eq!(
        pixels(|field| {
            let mut odd = tensor(Dtype::U8, &[16, 12]);
            odd.dtype = "quint4x2".into();
            field.data = Some(MmData::Tensor(odd));
        })
        .as_deref(),
        field
    );
    assert_eq!(
        pixels(|field| {
            field.kind = FieldKind::Flat {
                slices: vec![[Some(0), Some(15), None]],
                dim: 0,
                keep_on_cpu: false,
            };
        })
        .as_deref(),
        field
    );
}

proptest! {
    #[test]
    fn arbitrary_request_does_not_panic(
        offset in any::<usize>(),
        length in any::<usize>(),
        extents in any::<[i64; 3]>(),
        shape in proptest::collection::vec(any::<usize>(), 0..4),
        stop in any::<Option<i64>>(),
        mask in proptest::option::of(proptest::collection::vec(any::<bool>(), 0..4)),
    ) {
        let mut request = text();
        let mut odd = feature(0, 4);
        odd.position = Placeholder { offset, length, is_embed: mask };
        let mut item = item(16, extents);
        if let Some(MmData::Tensor(pixels)) = &mut item.0[0].1.data {
            pixels.shape = shape;
        }
        let slices = vec![[None, stop, None]];
        item.0[0].1.kind = FieldKind::Flat { slices, dim: 0, keep_on_cpu: false };
        odd.data = Some(item);
        request.mm_features = vec![odd];
        let _ = check(&request, &engine(), &options());
    }

    #[test]
    fn grid_passes_only_with_its_rows(
        rows in 1_usize..30,
        t in 1_i64..4,
        h in 1_i64..5,
        w in 1_i64..5,
    ) {
        let refused = with(|request| request.mm_features[0].data = Some(item(rows, [t, h, w])));
        prop_assert_eq!(refused.is_none(), rows as i64 == t * h * w);
    }
}

#[test]
fn adapter_needs_lora_engine() {
    let lora = crate::wire::LoraRequest { name: "a@1".to_owned(), id: 1, path: "/a".to_owned() };
    let with_adapter = |lora| EngineCoreRequest { lora_request: Some(Arc::new(lora)), ..text() };
    let with_lora = EngineReady { supports_lora: true, max_loras: 1, ..engine() };
    assert!(check(&with_adapter(lora.clone()), &with_lora, &options()).is_ok());
    let error = check(&with_adapter(lora.clone()), &engine(), &options()).unwrap_err().to_string();
    assert_eq!(error, "lora_request: LoRA is not enabled in the engine");
    let invalid = crate::wire::LoraRequest { id: 0, ..lora };
    assert!(check(&with_adapter(invalid), &with_lora, &options()).is_err());
}
