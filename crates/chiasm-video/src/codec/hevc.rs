//! HEVC: the parameter sets and the headers of NAL units (ITU-T H.265, clause 7.3).

use super::bits::Bits;
use super::nal::{self, ParameterSets};
use super::picture::{Picture, RandomAccess, StreamHeader};
use crate::bytes::u16_at;
use crate::error::IndexError;

/// Types below are pictures without random access; even ones are not referred to by pictures of
/// their own temporal layer.
const NAL_FIRST_IRAP: u8 = 16;
/// The last BLA that may have leading pictures.
const NAL_LAST_LEADING_BLA: u8 = 17;
/// The last of BLA and IDR.
const NAL_LAST_CLOSED: u8 = 20;
const NAL_CRA: u8 = 21;
/// A BLA without leading pictures.
pub(crate) const NAL_BLA_N_LP: u8 = 18;
const NAL_LAST_IRAP: u8 = 23;
const NAL_VPS: u8 = 32;
const NAL_SPS: u8 = 33;
const NAL_PPS: u8 = 34;
const NAL_END_OF_SEQUENCE: u8 = 36;
const NAL_END_OF_BITSTREAM: u8 = 37;

/// Returns the type of a NAL unit by its first byte.
fn kind(header: u8) -> u8 {
    header >> 1 & 63
}

/// The decoder configuration in `hvcC`.
pub(super) struct Config<'a> {
    pub(super) length_size: usize,
    /// The number of temporal layers; 0 if unknown.
    pub(super) temporal_layers: u8,
    pub(super) sets: ParameterSets<'a>,
}

/// Reads an `hvcC`.
pub(super) fn read_config(config: &[u8]) -> Option<Config<'_>> {
    let packed = *config.get(21)?;
    let mut sets = ParameterSets::default();
    let mut at = 23usize;
    for _ in 0..*config.get(22)? {
        let count = u16_at(config, at.checked_add(1)?)?;
        at = at.checked_add(3)?;
        for _ in 0..count {
            at = sets.push_prefixed(config, at)?;
        }
    }
    Some(Config {
        length_size: usize::from(packed & 3) + 1,
        temporal_layers: packed >> 3 & 7,
        sets,
    })
}

/// Reads the size of the pictures from a sequence parameter set.
pub(super) fn read_sps(nal: &[u8]) -> Result<StreamHeader, IndexError> {
    let sps = parse_sps(nal).ok_or(IndexError::CodecHeader)?;
    let header = StreamHeader::new(sps.width, sps.height)?;
    Ok(StreamHeader { is_reordered: sps.is_reordered, ..header })
}

struct Sps {
    width: i64,
    height: i64,
    is_reordered: bool,
}

fn parse_sps(nal: &[u8]) -> Option<Sps> {
    let mut bits = Bits::new(nal, 2);
    bits.skip(4);
    let sub_layers = bits.bits(3)?;
    bits.skip(1);
    skip_profile_tier_level(&mut bits, sub_layers)?;
    bits.ue()?;
    let chroma = bits.ue()?;
    if chroma == 3 && bits.flag()? {
        return None;
    }
    let mut width = i64::from(bits.ue()?);
    let mut height = i64::from(bits.ue()?);
    if bits.flag()? {
        let sides = [bits.ue()?, bits.ue()?, bits.ue()?, bits.ue()?].map(i64::from);
        let unit_x = if chroma == 1 || chroma == 2 { 2 } else { 1 };
        let unit_y = if chroma == 1 { 2 } else { 1 };
        width -= unit_x * (sides[0] + sides[1]);
        height -= unit_y * (sides[2] + sides[3]);
    }
    // Bit depths, and the size of the picture order count.
    for _ in 0..3 {
        bits.ue()?;
    }
    let first_layer = if bits.flag()? { 0 } else { sub_layers };
    let mut is_reordered = false;
    for _ in first_layer..=sub_layers {
        bits.ue()?;
        is_reordered |= bits.ue()? > 0;
        bits.ue()?;
    }
    Some(Sps { width, height, is_reordered })
}

fn skip_profile_tier_level(bits: &mut Bits, sub_layers: u32) -> Option<()> {
    bits.skip(88 + 8);
    let mut present = Vec::new();
    for _ in 0..sub_layers {
        present.push((bits.flag()?, bits.flag()?));
    }
    if sub_layers > 0 {
        bits.skip(2 * (8 - sub_layers as usize));
    }
    for (has_profile, has_level) in present {
        bits.skip(if has_profile { 88 } else { 0 });
        bits.skip(if has_level { 8 } else { 0 });
    }
    Some(())
}

/// Reads the headers of a sample's NAL units. Raises `highest_layer` to the number of temporal
/// layers that it shows.
pub(super) fn read_sample(
    sample: &[u8],
    config: &Config<'_>,
    expected: StreamHeader,
    highest_layer: &mut u8,
    sets: &mut nal::InBandSets<'_>,
) -> Result<Picture, IndexError> {
    let mut pictures = 0;
    let mut first_kind = None;
    let mut is_droppable = true;
    let mut ends_sequence = false;
    for nal in nal::units(sample, config.length_size) {
        let nal = nal?;
        ends_sequence |= nal.first().is_some_and(|&header| {
            matches!(kind(header), NAL_END_OF_SEQUENCE | NAL_END_OF_BITSTREAM)
        });
        let &[header, second, third, ..] = nal else {
            continue;
        };
        let kind = kind(header);
        // Other layers are views or enhancements, which cv2 does not show.
        let layer = header & 1 != 0 || second >> 3 != 0;
        if matches!(kind, NAL_VPS..=NAL_PPS) {
            let is_new = sets.add(nal);
            if is_new && kind == NAL_SPS && !layer && read_sps(nal)? != expected {
                return Err(IndexError::CodecHeader);
            }
        }
        if kind >= NAL_VPS || layer {
            continue;
        }
        pictures += usize::from(third & 0x80 != 0);
        let temporal_id_plus_1 = second & 7;
        *highest_layer = temporal_id_plus_1.max(*highest_layer);
        is_droppable &= kind < NAL_FIRST_IRAP
            && kind.is_multiple_of(2)
            && temporal_id_plus_1 == config.temporal_layers;
        if *first_kind.get_or_insert(kind) != kind {
            return Err(IndexError::Pictures);
        }
    }
    let (1, Some(kind)) = (pictures, first_kind) else {
        return Err(IndexError::Pictures);
    };
    let start = match kind {
        // Decoders skip some of the pictures behind it, which shifts the numbers of frames.
        NAL_FIRST_IRAP..=NAL_LAST_LEADING_BLA => return Err(IndexError::Pictures),
        NAL_BLA_N_LP..=NAL_LAST_CLOSED => RandomAccess::Closed,
        NAL_CRA..=NAL_LAST_IRAP => RandomAccess::Open,
        _ => RandomAccess::No,
    };
    Ok(Picture { start, is_droppable, has_b_slice: false, ends_sequence })
}

/// Returns the first sequence parameter set of a sample.
pub(super) fn find_sps(sample: &[u8], length_size: usize) -> Option<&[u8]> {
    nal::units(sample, length_size)
        .map_while(Result::ok)
        .find(|nal| nal.first().is_some_and(|&header| kind(header) == NAL_SPS))
}

/// Returns the sequence parameter set of a configuration.
pub(super) fn first_sps<'a>(sets: &ParameterSets<'a>) -> Option<&'a [u8]> {
    sets.find(|header| kind(header) == NAL_SPS)
}

/// Returns the positions of a sample's slice headers whose type is CRA, and the first byte of each
/// as a BLA without leading pictures. A CRA behind a gap would be decoded as if nothing were
/// missing; a BLA has the same syntax.
pub(crate) fn cra_as_bla(sample: &[u8], length_size: usize) -> Vec<(usize, u8)> {
    let mut patches = Vec::new();
    let mut at = 0;
    for nal in nal::units(sample, length_size).map_while(Result::ok) {
        at += length_size;
        if let Some(&header) = nal.first().filter(|&&header| kind(header) == NAL_CRA) {
            patches.push((at, header & 0x81 | NAL_BLA_N_LP << 1));
        }
        at += nal.len();
    }
    patches
}

/// Checks that all sequence parameter sets of a configuration's base layer state the same size.
pub(super) fn check_sps(
    sets: &ParameterSets<'_>,
    expected: StreamHeader,
) -> Result<(), IndexError> {
    let is_base = |unit: &[u8]| {
        kind(unit[0]) == NAL_SPS
            && unit[0] & 1 == 0
            && unit.get(1).is_some_and(|byte| byte >> 3 == 0)
    };
    let mut all = sets.all(is_base);
    if all.all(|nal| read_sps(nal) == Ok(expected)) { Ok(()) } else { Err(IndexError::CodecHeader) }
}
