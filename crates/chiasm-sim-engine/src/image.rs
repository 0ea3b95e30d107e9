//! The simulated processing of media items: their shapes and sizes, checked for consistency.

use chiasm_engine::wire::{MmData, MmField, MmItem, WireTensor};
use chiasm_types::{Dtype, Placeholder};

use crate::config::ImageRules;
use crate::digest::Digest;

/// A media item as an engine observes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObservedItem {
    /// The item's size.
    pub(crate) size: Size,
    /// The number of tokens that the item takes in the language model.
    pub(crate) embeddings: usize,
    /// The digest of the bytes of its pixels, or of its largest tensor, inline or in a slot.
    pub(crate) digest: Digest,
}

/// The size of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// An image with this number of pixels.
    Image { width: u64, height: u64 },
    /// An item other than an image, whose largest tensor has this shape.
    Other(Vec<usize>),
}

/// An error that makes a worker fail at an item.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ItemError {
    #[error("the item has no tensor")]
    NoTensor,
    #[error("pixel_values are {0}")]
    Dtype(String),
    #[error("pixel_values have shape {0:?}")]
    Shape(Vec<usize>),
    #[error("the item has no integer tensor image_grid_thw")]
    NoGrid,
    #[error("image_grid_thw is {0:?}")]
    Grid(Vec<i64>),
    #[error("pixel_values have {rows} rows, the grid {grid} has {patches} patches")]
    Rows { rows: usize, grid: String, patches: u64 },
    #[error("pixel_values have {row} values per row, not 3 · {temporal} · patch²")]
    Row { row: usize, temporal: u32 },
    #[error("the grid {grid} can not be merged {merge} by {merge}")]
    Merge { grid: String, merge: u64 },
    #[error("the placeholder has {tokens} tokens for {embeddings} embeddings")]
    Placeholder { tokens: usize, embeddings: usize },
}

/// Returns the number of a placeholder's tokens that the model replaces with embeddings.
pub(crate) fn embedding_tokens(placeholder: &Placeholder) -> usize {
    match &placeholder.is_embed {
        Some(mask) => mask.iter().filter(|&&embed| embed).count(),
        None => placeholder.length,
    }
}

/// The facts about an item that the simulation needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ItemFacts {
    pixels: Option<Pixels>,
    is_not_image: bool,
    /// The values of `image_grid_thw`, if they are integers.
    grid: Option<Vec<i64>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Pixels {
    dtype: String,
    shape: Vec<usize>,
    digest: Digest,
}

impl ItemFacts {
    /// Extracts the facts about an item without out-of-band tensors. `digest` is the digest of the
    /// bytes of [`digested_tensor`], if the item has one.
    pub(crate) fn new(item: &MmItem, digest: Option<Digest>) -> Self {
        let pixels = digested_tensor(item).zip(digest);
        Self {
            is_not_image: pixels_of(item).is_none(),
            pixels: pixels.map(|(pixels, digest)| Pixels {
                dtype: pixels.dtype.to_string(),
                shape: pixels.shape.clone(),
                digest,
            }),
            grid: tensor_named(item, "image_grid_thw").and_then(WireTensor::integers),
        }
    }
}

/// Returns `pixel_values`, or `pixel_values_flat` as in InternVL's chat models.
pub(crate) fn pixels_of(item: &MmItem) -> Option<&WireTensor> {
    tensor_named(item, "pixel_values").or_else(|| tensor_named(item, "pixel_values_flat"))
}

/// Returns the tensor whose bytes are digested: the pixels, or the largest tensor of an item that
/// is not an image.
pub(crate) fn digested_tensor(item: &MmItem) -> Option<&WireTensor> {
    let largest = || {
        item.0.iter().filter_map(|(_, field)| field.tensor()).max_by_key(|tensor| tensor.nbytes())
    };
    pixels_of(item).or_else(largest)
}

fn tensor_named<'a>(item: &'a MmItem, name: &str) -> Option<&'a WireTensor> {
    item.get(name).and_then(MmField::tensor)
}

/// Checks an item and returns what an engine observes.
///
/// A Qwen-VL image has `pixel_values [rows, 3 · temporal · patch²]` and `image_grid_thw` in
/// patches. For images of other families, `[3, height, width]` or `[tiles, 3, height, width]`, only
/// the shape is checked, because the number of embeddings depends on the model. Items other than
/// images are not checked.
///
/// # Errors
/// Returns [`ItemError`] if a worker would fail at the item.
pub(crate) fn inspect(
    item: &ItemFacts,
    placeholder: &Placeholder,
    rules: &ImageRules,
) -> Result<ObservedItem, ItemError> {
    let Pixels { dtype, shape, digest } = item.pixels.as_ref().ok_or(ItemError::NoTensor)?;
    let digest = *digest;
    if item.is_not_image {
        return Ok(ObservedItem {
            size: Size::Other(shape.clone()),
            embeddings: embedding_tokens(placeholder),
            digest,
        });
    }
    if !Dtype::from_torch_name(dtype).is_some_and(|dtype| rules.dtypes.contains(&dtype)) {
        return Err(ItemError::Dtype(dtype.clone()));
    }
    let (rows, row) = match shape[..] {
        [rows, row] => (rows, row),
        [3, high, wide] | [_, 3, high, wide] if item.grid.is_none() && !shape.contains(&0) => {
            let embeddings = embedding_tokens(placeholder);
            let size = Size::Image { width: wide as u64, height: high as u64 };
            return Ok(ObservedItem { size, embeddings, digest });
        }
        _ => return Err(ItemError::Shape(shape.clone())),
    };
    let grid = item.grid.as_deref().ok_or(ItemError::NoGrid)?;
    let sides: Vec<u64> = grid.iter().filter_map(|&side| u64::try_from(side).ok()).collect();
    let &[frames, high, wide] = &sides[..] else {
        return Err(ItemError::Grid(grid.to_vec()));
    };
    let patches =
        frames.checked_mul(high).and_then(|patches| patches.checked_mul(wide)).unwrap_or(u64::MAX);
    if rows as u64 != patches {
        return Err(ItemError::Rows { rows, grid: format!("{frames}x{high}x{wide}"), patches });
    }
    let patch = exact_sqrt(row / (3 * rules.temporal as usize))
        .filter(|side| side * side * 3 * rules.temporal as usize == row && *side > 0)
        .ok_or(ItemError::Row { row, temporal: rules.temporal })?;
    let merge = u64::from(rules.merge);
    if high % merge != 0 || wide % merge != 0 {
        return Err(ItemError::Merge { grid: format!("{frames}x{high}x{wide}"), merge });
    }
    let embeddings = (patches / (merge * merge)) as usize;
    let expected = embedding_tokens(placeholder);
    if rules.strict_placeholders && expected != embeddings {
        return Err(ItemError::Placeholder { tokens: expected, embeddings });
    }
    let width = wide.saturating_mul(patch as u64);
    let height = high.saturating_mul(patch as u64);
    Ok(ObservedItem { size: Size::Image { width, height }, embeddings, digest })
}

fn exact_sqrt(area: usize) -> Option<usize> {
    let side = area.isqrt();
    (side * side == area).then_some(side)
}

/// Returns the number of bytes that vLLM counts for an item in its receiver cache
/// (`MultiModalCache.get_item_size`).
pub(crate) fn cached_bytes(item: &MmItem) -> u64 {
    // The results of `sys.getsizeof` for a small int, a float and None.
    const INT: u64 = 28;
    const FLOAT: u64 = 24;
    const NONE: u64 = 16;
    fn size(data: &MmData) -> u64 {
        match data {
            MmData::Tensor(tensor) => tensor.nbytes().unwrap_or_default() as u64,
            MmData::Int(_) => INT,
            MmData::Float(_) => FLOAT,
            MmData::List(list) => list.iter().map(size).sum(),
        }
    }
    item.0.iter().map(|(_, field)| field.data.as_ref().map_or(NONE, size)).sum()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use bytes::Bytes;

    /// Returns a Qwen2-VL item of `high × wide` patches of 14 pixels.
    pub(crate) fn item(high: i64, wide: i64) -> MmItem {
        item_with(Dtype::U8, (high * wide) as usize, 1176, [1, high, wide])
    }

    pub(crate) fn item_with(dtype: Dtype, rows: usize, row: usize, grid: [i64; 3]) -> MmItem {
        let pixels = WireTensor::new(
            dtype,
            vec![rows, row],
            Bytes::from(vec![7; rows * row * dtype.size()]),
        )
        .unwrap();
        let grid: Vec<u8> = grid.iter().flat_map(|side| side.to_le_bytes()).collect();
        let grid = WireTensor::new(Dtype::I64, vec![3], grid.into()).unwrap();
        MmItem(vec![
            ("pixel_values".into(), MmField::flat(pixels, rows)),
            ("image_grid_thw".into(), MmField::batched(grid, true)),
        ])
    }

    pub(crate) fn placeholder(offset: usize, length: usize) -> Placeholder {
        Placeholder { offset, length, is_embed: None }
    }

    pub(crate) fn facts(item: &MmItem) -> ItemFacts {
        ItemFacts::new(item, pixels_of(item).and_then(WireTensor::bytes).map(Digest::compute))
    }

    fn observe(item: &MmItem, length: usize) -> Result<ObservedItem, ItemError> {
        inspect(&facts(item), &placeholder(0, length), &ImageRules::default())
    }

    #[test]
    fn image_size_comes_from_its_grid() {
        let image = observe(&item(16, 20), 80).unwrap();
        let digest = Digest::compute(&[7; 320 * 1176]);
        let size = Size::Image { width: 280, height: 224 };
        assert_eq!(image, ObservedItem { size, embeddings: 80, digest });
        // Qwen3-VL: patches of 16 pixels
        let image = observe(&item_with(Dtype::F32, 288, 1536, [1, 16, 18]), 72).unwrap();
        let digest = Digest::compute(&[7; 288 * 1536 * 4]);
        let size = Size::Image { width: 288, height: 256 };
        assert_eq!(image, ObservedItem { size, embeddings: 72, digest });
    }

    #[test]
    fn inconsistent_image_is_refused() {
        for (item, length, reason) in [
            (item_with(Dtype::U8, 319, 1176, [1, 16, 20]), 80, "319 rows"),
            (item_with(Dtype::U8, 320, 1175, [1, 16, 20]), 80, "1175 values per row"),
            (item_with(Dtype::I64, 320, 1176, [1, 16, 20]), 80, "int64"),
            (item_with(Dtype::U8, 15, 1176, [1, 3, 5]), 3, "merged"),
            (item(16, 20), 79, "79 tokens for 80 embeddings"),
            (MmItem::default(), 80, "no tensor"),
        ] {
            let error = observe(&item, length).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn images_of_other_families_are_planes_or_tiles() {
        for (name, shape, reason) in [
            ("pixel_values", &[3, 28, 42][..], None),
            ("pixel_values", &[5, 3, 28, 42], None),
            ("pixel_values_flat", &[5, 3, 28, 42], None),
            ("pixel_values", &[5, 4, 28, 42], Some("shape")),
            ("pixel_values", &[0, 3, 28, 42], Some("shape")),
        ] {
            let bytes = vec![0; 4 * shape.iter().product::<usize>()];
            let digest = Digest::compute(&bytes);
            let tensor = WireTensor::new(Dtype::F32, shape.to_vec(), bytes.into()).unwrap();
            let item = MmItem(vec![(name.into(), MmField::batched(tensor, false))]);
            match (observe(&item, 7), reason) {
                (Ok(image), None) => {
                    let size = Size::Image { width: 42, height: 28 };
                    assert_eq!(image, ObservedItem { size, embeddings: 7, digest });
                }
                (Err(error), Some(reason)) => {
                    assert!(error.to_string().contains(reason), "{error}")
                }
                (result, _) => panic!("{name} {shape:?}: {result:?}"),
            }
        }
    }

    #[test]
    fn largest_tensor_of_other_items_is_observed() {
        let tensor = |dtype: Dtype, shape: &[usize]| {
            let bytes = vec![5; shape.iter().product::<usize>() * dtype.size()];
            MmField::batched(WireTensor::new(dtype, shape.to_vec(), bytes.into()).unwrap(), false)
        };
        let mask = ("feature_attention_mask".to_owned(), tensor(Dtype::I64, &[9]));
        let item =
            MmItem(vec![mask, ("input_audio_features".to_owned(), tensor(Dtype::F32, &[8, 9]))]);
        let digest = digested_tensor(&item).and_then(WireTensor::bytes).map(Digest::compute);
        let facts = ItemFacts::new(&item, digest);
        let observed = inspect(&facts, &placeholder(0, 4), &ImageRules::default()).unwrap();
        let digest = Digest::compute(&[5; 8 * 9 * 4]);
        let size = Size::Other(vec![8, 9]);
        assert_eq!(observed, ObservedItem { size, embeddings: 4, digest });
    }

    #[test]
    fn only_embedding_tokens_count() {
        let mut mask = vec![true; 82];
        mask[0] = false;
        mask[81] = false;
        let position = Placeholder { offset: 40, length: 82, is_embed: Some(mask) };
        assert!(inspect(&facts(&item(16, 20)), &position, &ImageRules::default()).is_ok());
    }

    #[test]
    fn receiver_cache_counts_tensor_bytes() {
        assert_eq!(cached_bytes(&item(16, 20)), 320 * 1176 + 3 * 8);
        let small = MmField {
            data: Some(MmData::List(vec![MmData::Int(1), MmData::Float(1.0)])),
            ..item(2, 2).0.remove(0).1
        };
        assert_eq!(cached_bytes(&MmItem(vec![("small".into(), small)])), 28 + 24);
    }
}
