//! NumPy's `.npy` files, version 1.0
//! (<https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>).

use std::io::{self, Write};

use chiasm_types::Dtype;

/// Writes one row-major array. NumPy has no bfloat16, so its bits are written as `uint16`.
pub(crate) fn write(
    to: &mut impl Write,
    dtype: Dtype,
    shape: &[usize],
    bytes: &[u8],
) -> io::Result<()> {
    let descr = match dtype {
        Dtype::U8 => "|u1",
        Dtype::Bool => "|b1",
        Dtype::I8 => "|i1",
        Dtype::I16 => "<i2",
        Dtype::I32 => "<i4",
        Dtype::I64 => "<i8",
        Dtype::F16 => "<f2",
        Dtype::BF16 => "<u2",
        Dtype::F32 => "<f4",
        Dtype::F64 => "<f8",
    };
    // A Python tuple with one element needs its comma.
    let shape: String = shape.iter().map(|dim| format!("{dim},")).collect();
    let mut header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    // Magic, version, length, header and newline together are padded to a multiple of 64 bytes.
    let unpadded = 6 + 2 + 2 + header.len() + 1;
    header.extend(std::iter::repeat_n(' ', unpadded.next_multiple_of(64) - unpadded));
    header.push('\n');
    let length = u16::try_from(header.len()).map_err(io::Error::other)?;
    to.write_all(b"\x93NUMPY\x01\x00")?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(header.as_bytes())?;
    to.write_all(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_starts_at_multiple_of_64_bytes() {
        let mut file = Vec::new();
        write(&mut file, Dtype::F32, &[2, 3], &[7; 24]).unwrap();
        assert_eq!(&file[..8], b"\x93NUMPY\x01\x00");
        let header = usize::from(u16::from_le_bytes([file[8], file[9]]));
        assert_eq!((10 + header) % 64, 0);
        let text = std::str::from_utf8(&file[10..10 + header]).unwrap();
        assert!(
            text.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2,3,), }"),
            "{text}"
        );
        assert!(text.ends_with('\n'));
        assert_eq!(&file[10 + header..], &[7; 24]);
    }
}
